"""What a committed command means. Pure: no I/O, no clock, no randomness, no await.

`machine.apply` is the door for changes, `queries` the one for reading; both work on `state.State`.
"""

from holdfast import require_asserts

assert __name__ == "holdfast.statemachine", f"import holdfast.statemachine, not {__name__}"

require_asserts("A Holdfast node")
