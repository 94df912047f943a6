"""The actions on invocations: cancel, kill, pause, resume, restart and purge, as commands and as answers."""

from __future__ import annotations

import os
from typing import assert_never

from holdfast.cluster.admin.choices import ACTIONS, STEP_MAX, TAKEN_BY, Action
from holdfast.cluster.admin.parameters import AdminRequest, Parameters
from holdfast.cluster.admin.shapes.invocations import DONE, ActionDone
from holdfast.cluster.errors import BadRequest, NotFound
from holdfast.sdk.ids import ID_BYTES, DeploymentId, InvocationId, format_id
from holdfast.statemachine.commands import Cancel, Command, Kill, Pause, Purge, Restart, Resume
from holdfast.statemachine.effects import Code, Result


def command_of(action: Action, id_: InvocationId, parameters: Parameters, deployment: DeploymentId | None) -> Command:
    match action:
        case "cancel":
            return Cancel(id_)
        case "kill":
            return Kill(id_)
        case "pause":
            return Pause(id_)
        case "resume":
            return Resume(id_, deployment)
        case "purge":
            return Purge(id_)
        case "restart":
            # In the partition of the first one, which has its journal.
            new_id = InvocationId(id_[:4] + os.urandom(ID_BYTES - 4))
            return Restart(id_, new_id, parameters.number("step", 0, 0, STEP_MAX), deployment)
        case _:
            assert_never(action)


def show_done(action: Action, id_: InvocationId, result: Result) -> ActionDone:
    status = DONE[action] if result.code == Code.DONE else "Unchanged"
    shown: ActionDone = {"id": format_id(id_), "status": status}
    if action == "restart":
        shown["new_id"] = result.message
    elif result.message:
        shown["message"] = result.message
    return shown


def action_of(request: AdminRequest, parameters: Parameters) -> Action:
    given = request.path["action"]
    action = next((action for action in ACTIONS if action == given), None)
    if action is None:
        raise NotFound(f"there is no action {given!r:.60}", f"there are: {', '.join(ACTIONS)}")
    for name, actions in TAKEN_BY.items():
        if action not in actions and parameters.text(name) is not None:
            raise BadRequest(f"{name}: only {' and '.join(actions)} {'accept' if len(actions) > 1 else 'accepts'} it")
    return action
