"""The machine of one attempt: it replays a journal, appends to it, and hands outcomes to the code in log order.

The machine is one object, written in layers. Each layer is a class that knows only the layers below it, from the top:

- `machine`: runs the code and says how it ended
- `steps`: what contexts ask for, and plain timers
- `suspension`: what the code waits for, and when the attempt can be handed back
- `outcomes`: delivery to the code, one at a time, and cancellation
- `claims`: the steps that the journal has and those that are appended
- `tasks`: the tasks of the code, and the end

`operation` is what the code holds of a step. Each layer declares its fields; the constructor of `Attempt` sets them, and they
are slots, because an attempt is made per invocation.
"""

from holdfast.sdk.attempt.machine import Attempt
from holdfast.sdk.attempt.never import NEVER
from holdfast.sdk.attempt.operation import Operation

__all__ = ["NEVER", "Attempt", "Operation"]
