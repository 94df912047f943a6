"""The replicated log: what it acknowledges is on the disks of a majority and is never lost.

It orders opaque bytes. What they mean is the business of the rooms above, so it imports none of them.
"""

assert __name__ == "holdfast.log", f"import holdfast.log, not {__name__}"
