"""Faults on real processes, and the checker that judges what clients saw meanwhile.

Never imported by what a node runs.
"""

assert __name__ == "holdfast.chaos", f"import holdfast.chaos, not {__name__}"
