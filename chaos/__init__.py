"""Faults on real processes, and the checker that judges what clients observed.

A node never imports this package.
"""

assert __name__ == "holdfast.chaos", f"import holdfast.chaos, not {__name__}"
