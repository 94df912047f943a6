"""Processes, sockets, clocks: the node, its ingress, its invoker, its admin API.

ARCHITECTURE.md describes its packages and their layers.
"""

from holdfast import require_asserts

assert __name__ == "holdfast.cluster", f"import holdfast.cluster, not {__name__}"

require_asserts("A Holdfast node")
