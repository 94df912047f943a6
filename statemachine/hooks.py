"""Notices for webhooks: what the leader of a partition still has to tell them.

The meta group knows the webhooks, with their addresses and secrets (`webhooks`). A partition only knows which events of which
services each of them wants: its leader writes that down with `SetHooks` whenever the meta group changes. Then an invocation
that fails, is paused or completes leaves a notice for each hook that wants it, in the same transaction. The leader delivers
notices and forgets them with `ForgetNotices`, so a notice is lost by no failure, and may be delivered twice.

Each hook has a bound of its own, so that a receiver that is down for days costs the others nothing. Beyond it the oldest
notice is dropped, and counted.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.statemachine.commands import ForgetNotices, SetHooks
from holdfast.statemachine.effects import OK, Code, DeliverNotices, Result
from holdfast.statemachine.outcomes import failure_of
from holdfast.statemachine.records import Hook, Invocation, pack, pack_invocation, unpack_hook
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import HOOK, TIME_MAX, after, notice_key, notices_of
from holdfast.statemachine.webhooks import COMPLETED, FAILED, HOOK_ID_BYTES, HOOKS_MAX, IN_DOUBT, PAUSED, HookId

#: Notices that wait for one hook in one partition.
NOTICES_MAX: Final = 10_000
#: Of the message of a failure; the whole of it is in the journal.
MESSAGE_LENGTH_MAX: Final = 1000
_KIND_IN_DOUBT: Final = "InDoubt"


def hooks_of(state: State) -> dict[HookId, Hook]:
    if state.hooks is None:
        state.hooks = {(id_ := HookId(key[1:])): unpack_hook(id_, raw) for key, raw in state.scan(HOOK, after(HOOK))}
    return state.hooks


def note_end(state: State, record: Invocation, outcome: list[Any], *, failed: bool) -> None:
    _note(state, record, FAILED if failed else COMPLETED, outcome)


def note_pause(state: State, record: Invocation, outcome: list[Any] | None) -> None:
    failure = failure_of(outcome) if outcome is not None else None
    doubt = failure is not None and failure.kind == _KIND_IN_DOUBT
    _note(state, record, IN_DOUBT if doubt else PAUSED, outcome)


def note_approval(state: State, record: Invocation, event: int, asked: list[Any]) -> None:
    """`asked`: what `queries.Notice.approval` has."""
    _note(state, record, event, None, asked=asked)


def _note(
    state: State, record: Invocation, event: int, outcome: list[Any] | None, asked: list[Any] | None = None
) -> None:
    """Leave a notice for each hook that wants it, and drop its oldest one if there are too many."""
    row: bytes = b""
    meta = state.meta
    for hook in hooks_of(state).values():
        if hook.gone or not hook.events & event or (hook.services and record.service not in hook.services):
            continue
        if not row:
            failure = failure_of(outcome) if outcome is not None else None
            shown = [failure.code, failure.message[:MESSAGE_LENGTH_MAX], failure.kind] if failure is not None else None
            fields = [state.now_ms, event, record.id, pack_invocation(record), shown]
            row = pack(fields if asked is None else [*fields, asked])
        if not state.changed_hooks:
            state.effects.append(DeliverNotices())
        meta.notices += 1
        state.put(notice_key(hook.id, meta.notices), row)
        hook.pending += 1
        state.changed_hooks[hook.id] = hook
        if hook.pending > NOTICES_MAX:
            oldest = next(key for key, _ in state.scan(*notices_of(hook.id)))
            state.delete(oldest)
            hook.pending -= 1
            hook.dropped += 1


def set_hooks(state: State, command: SetHooks) -> Result:
    """Notices of a hook that is gone are removed by its leader, in slices."""
    meta = state.meta
    if state.level < 2 or command.version <= meta.hooks:
        return Result(Code.UNCHANGED, f"the hooks of version {meta.hooks} are known")
    meta.hooks = min(command.version, TIME_MAX)
    hooks = hooks_of(state)
    wanted = {
        id_: (events, services) for id_, events, services in command.hooks[:HOOKS_MAX] if len(id_) == HOOK_ID_BYTES
    }
    for id_, (events, services) in wanted.items():
        hook = hooks.setdefault(id_, Hook(id_))
        hook.events, hook.services, hook.gone = events, list(services), False
        state.changed_hooks[id_] = hook
    for hook in [hook for id_, hook in hooks.items() if id_ not in wanted]:
        hook.gone = True
        _touch(state, hook)
    state.hooks = dict(sorted(hooks.items()))  # In the order in which they are read: it decides about sequences.
    state.effects.append(DeliverNotices())
    return OK


def forget(state: State, command: ForgetNotices) -> Result:
    hook = hooks_of(state).get(command.hook)
    if hook is None:
        return Result(Code.UNCHANGED, "the hook is gone")
    count = 0
    for sequence in command.sequences:
        key = notice_key(hook.id, sequence) if 0 < sequence <= state.meta.notices else b""
        if key and state.get(key) is not None:
            state.delete(key)
            count += 1
    if not count:
        return Result(Code.UNCHANGED, "these notices were removed before")
    hook.pending -= count
    hook.dropped += count if command.dropped else 0
    _touch(state, hook)
    return OK


def _touch(state: State, hook: Hook) -> None:
    """Keep a hook that changed; remove it with its last notice if it was deleted."""
    if hook.pending or not hook.gone:
        state.changed_hooks[hook.id] = hook
        return
    state.delete(HOOK + hook.id)
    hooks_of(state).pop(hook.id, None)
    state.changed_hooks.pop(hook.id, None)
