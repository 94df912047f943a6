"""The replicated log: an acknowledged entry is on the disks of a majority and is never lost.

It orders opaque bytes. Their meaning is the business of the rooms above, so it imports none of them.
"""

from holdfast import require_asserts

assert __name__ == "holdfast.log", f"import holdfast.log, not {__name__}"

require_asserts("A Holdfast node")
