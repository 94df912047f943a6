"""A partition's state as a file: cut, verify, store, fetch, restore, and when the log may be trimmed.

`cut` copies a live LMDB environment into a file with a self-describing header (`format`). `catalog` keeps such files in
a store: a directory or S3 (`stores`). `transfer` fetches a file from a store or from a peer. `restore` atomically
replaces a state with a snapshot. `policy` decides when to cut and to trim. docs/snapshots.md has the whole picture.

Nothing here knows what the state means, which node leads, or what time it is. `cluster` knows, and calls.
"""

from holdfast import require_asserts

assert __name__ == "holdfast.snapshots", f"import holdfast.snapshots, not {__name__}"

require_asserts("A Holdfast node")
