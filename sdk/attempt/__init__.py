"""The machine of one attempt: it replays a journal, appends to it, and delivers outcomes to the code in log order.

The machine is one object, written in layers. Each layer is a class that knows only the layers below it, from the top:

- `machine`: runs the code and reports how it ended
- `steps`: the operations of contexts, and plain timers
- `suspension`: what the code waits for, and when the attempt can be handed back
- `outcomes`: delivery to the code, one at a time, and cancellation
- `claims`: the steps in the journal and those that are appended
- `tasks`: the tasks of the code, and the end

`operation` is the code's handle of a step. Each layer declares its fields. The constructor of `Attempt` sets them, and
they are slots, because every attempt creates one of these objects.
"""

from holdfast.sdk.attempt.machine import Attempt
from holdfast.sdk.attempt.never import NEVER
from holdfast.sdk.attempt.operation import Operation

__all__ = ["NEVER", "Attempt", "Operation"]
