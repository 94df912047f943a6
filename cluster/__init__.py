"""Processes, sockets, clocks: the node, its ingress, its invoker, its admin API.

Nothing is here yet; ARCHITECTURE.md says what will be.
"""

from holdfast import require_asserts

assert __name__ == "holdfast.cluster", f"import holdfast.cluster, not {__name__}"

require_asserts("A Holdfast node")
