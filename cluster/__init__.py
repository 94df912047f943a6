"""Processes, sockets, clocks: the node, its ingress, its invoker, its admin API.

Nothing is here yet; ARCHITECTURE.md says what will be.
"""

assert __name__ == "holdfast.cluster", f"import holdfast.cluster, not {__name__}"
