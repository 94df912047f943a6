"""A partition's state as a file: cut, verify, store, fetch, restore, and when the log may be trimmed.

`cut` copies a working LMDB environment into a file whose header says what it is (`format`). `catalog` keeps such files in a
store, a directory or S3 (`stores`); `transfer` brings one back from there or from a peer; `restore` puts it in the place
of a state, atomically. `policy` decides when.
docs/snapshots.md tells it whole.

Nothing here knows what the state means, who leads, or when it is time: `cluster` does, and calls.
"""

from holdfast import require_asserts

assert __name__ == "holdfast.snapshots", f"import holdfast.snapshots, not {__name__}"

require_asserts("A Holdfast node")
