"""Random commands with the right types. They name only a few objects, so they interact; many of them are invalid."""

from __future__ import annotations

from random import Random
from typing import Any

from holdfast.sdk.ids import DeploymentId, InvocationId, PartitionNumber
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries, refs
from holdfast.statemachine.blobs import CHUNK_BYTES, KEEP_MS, object_name
from holdfast.statemachine.commands import (
    AbandonStep,
    Announce,
    AttachTo,
    Cancel,
    Command,
    Complete,
    CompletePromise,
    CompleteStep,
    Decide,
    DecideStep,
    Deliver,
    FailAttempt,
    FireTimers,
    ForgetNotices,
    ForgetObjects,
    Invoke,
    KeepBlob,
    Kill,
    Mode,
    Pause,
    Payload,
    PostponeAttempt,
    Purge,
    PutBlob,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Redispatch,
    Ref,
    Restart,
    Resume,
    Retry,
    SetHooks,
    SetLimits,
    SetState,
    SuspendAttempt,
    TouchBlob,
    TrimOutbox,
    encode_command,
)
from holdfast.statemachine.tables import ACTIVE, COMPLETED, after
from holdfast.statemachine.txn import ReadTxn
from holdfast.statemachine.values import fingerprint
from holdfast.statemachine.webhooks import HookId
from tests.statemachine.rig import ident

DP_1, DP_2 = DeploymentId("dp_1"), DeploymentId("dp_2")

KEYS = [None, None, "k", "l"]
#: Large values: of one piece, of two pieces, and one that starts with the marker of a value.
BLOBS = [b"large" * 20, bytes(CHUNK_BYTES + 3), b"\x01marked" * 9]
SECRETS = [b"", b"8 bytes!", b"8 others"]
HOOKS = [HookId(b"hook 1.."), HookId(b"hook 2.."), HookId(b"hook 3..")]
TAGS: list[dict[str, str] | None] = [
    None,
    None,
    {},
    {"tenant": "acme"},
    {"tenant": "acme", "order": "17"},
    {"order": "18"},
]
EDGES = [-(2**63), -1, 0, 1, 1000, 2**31, 2**63 - 1]


def random_command(random: Random, txn: ReadTxn) -> Command:
    """Invocations and steps are more frequent than the rest, because other commands act on them. Most commands are
    aimed at existing records; the others at unknown or completed ones."""
    make = random.choice([_invoke, _step, _step, _step, _step, _step, _attempt, _other, _other, _timers, _blob, _hooks])
    command = make(random)
    if isinstance(command, KeepBlob) and random.random() < 0.9:
        return _made_lately(random, command, txn)
    if isinstance(command, ForgetObjects):
        return ForgetObjects([*queries.objects_to_delete(txn, random.randrange(3)), *command.objects])
    if isinstance(command, ForgetNotices):
        found = queries.notices(txn, command.hook, random.randrange(1, 4))
        return command._replace(sequences=[*[notice.sequence for notice in found], *command.sequences])
    return command if random.random() < 0.15 else _aimed(random, command, txn)


def _made_lately(random: Random, command: KeepBlob, txn: ReadTxn) -> Command:
    """One of a few objects, made about now, long ago or in the future."""
    about = queries.meta(txn).now_ms // 60_000 * 60_000 + random.choice([0, 0, 0, 0, KEEP_MS, -KEEP_MS, 3_600_000])
    return command._replace(object=object_name(command.blob, max(about, 0), bytes([random.randrange(2)]) * 8))


def _aimed(random: Random, command: Command, txn: ReadTxn) -> Command:
    if isinstance(command, Invoke) or "id" not in command._fields:
        return command
    table = COMPLETED if isinstance(command, Restart | Purge) else ACTIVE
    idents = [InvocationId(key[1:]) for key, _ in txn.scan(table, after(table))]
    record = queries.load(txn, random.choice(idents)) if idents else None
    if record is None:
        return command
    values: dict[str, Any] = {"id": record.id}
    if "epoch" in command._fields:
        values["epoch"] = record.epoch
    waiting = [index for index, _ in queries.waiting_steps(txn, record.id, 100)]
    if isinstance(command, SuspendAttempt):
        values["steps"] = random.choices(waiting, k=2) if waiting else []
    elif isinstance(command, RecordStep) or not waiting:
        values["step"] = record.length
    else:
        values["step"] = random.choice([*waiting, record.length])
    if isinstance(command, Restart):
        values["step"] = random.randrange(record.length + 1)
    fields = {name: value for name, value in values.items() if name in command._fields}
    aimed: Command = command._replace(**fields)
    return aimed


def _service(random: Random) -> tuple[str, str | None, int]:
    service = random.choice(["objects", "flows"])
    key = random.choice(KEYS)
    if key is None:
        return service, None, random.choice([Mode.PLAIN, Mode.PLAIN, Mode.EXCLUSIVE])
    return service, key, Mode.WORKFLOW if service == "flows" and random.random() < 0.5 else random.choice([1, 1, 2])


def _ident(random: Random) -> InvocationId:
    service, key, _ = _service(random)
    return ident(str(random.randrange(4)), service=service, key=key)


def _number(random: Random, end: int) -> int:
    return random.choice(EDGES) if random.random() < 0.05 else random.randrange(end)


def _outcome(random: Random) -> list[Any]:
    kind = random.choice(["", "Cancelled", "Killed", "ValueError"])
    return (
        [0, _payload(random, random.randbytes(random.randrange(9)))] if random.random() < 0.6 else [1, 500, "no", kind]
    )


def _payload(random: Random, plain: bytes) -> Payload:
    """A payload, or a reference: to a value that may exist, to one that never does, or an invalid one."""
    if random.random() < 0.6:
        return plain
    wrong = Ref(random.choice([0, 1, 2, 3, 9]), random.choice([b"", bytes(40), b"\xff" * 40]))
    return wrong if random.random() < 0.05 else refs.make(random.choice(BLOBS))[0]


def _retry(random: Random) -> Retry:
    if random.random() < 0.2:
        return Retry(*[random.choice(EDGES) for _ in Retry._fields])
    return Retry(
        random.randrange(500), 2000, 2000, random.randrange(5), random.randrange(2) * 500, random.randrange(500)
    )


def _invoke(random: Random) -> Invoke:
    service, key, mode = _service(random)
    which = ident(str(random.randrange(4)), service=service, key=key)
    caller = _ident(random) if random.random() < 0.2 else None
    start_at_ms = 1_700_000_000_000 + random.randrange(100_000) if random.random() < 0.2 else _number(random, 1)
    step = random.randrange(-1, 4)
    return Invoke(
        which, service, "h", key, mode, _payload(random, b"in"), {"a": "b"}, start_at_ms, caller, step,
        _number(random, 20_000), None, depth=random.choice([0, 0, 1, 2, 9]), callers=random.choice([(), ("a/h", "b/h")]),
        tags=random.choice(TAGS),
    )  # fmt: skip


def _argument(random: Random, op: int) -> list[Any]:
    if random.random() < 0.05:
        return random.choice([[], [None], ["x"], [1, 2, 3], [b"", b""]])
    name = random.choice(["x", "y", "name" * 20])
    match op:
        case Op.SLEEP:
            return [_number(random, 5000)]
        case Op.CALL:
            return ["objects", "h", None, b"in", {}]
        case Op.SEND:
            return ["objects", "h", None, b"in", {}, 5]
        case Op.SET:
            return [name, _payload(random, random.randbytes(random.randrange(5)))]
        case Op.RESOLVE:
            return [name, _outcome(random)]
        case Op.RESOLVE_AWAKEABLE:
            return [_ident(random) + random.choice(SECRETS), _number(random, 5), _outcome(random)]
        case Op.AWAKEABLE if random.random() < 0.5:
            return [random.choice(SECRETS)]
        case Op.APPROVAL:
            who, due, remind = random.choice([None, "ann"]), _number(random, 4000), _number(random, 4000)
            return [
                name,
                b"{}",
                ["yes", "no"][: random.randrange(3)],
                who,
                due,
                remind,
                random.random() < 0.5,
                SECRETS[1],
            ]
        case Op.ATTACH | Op.CANCEL:
            return [_ident(random)]
        case Op.CLEAR_ALL | Op.KEYS | Op.AWAKEABLE:
            return []
        case _:
            return [name]


def _step(random: Random) -> Command:
    which, epoch, index = _ident(random), random.randrange(1, 4), _number(random, 5)
    deployment = random.choice([None, DP_1, DP_2])
    match random.randrange(12):
        case 0:
            return RecordRunFailure(
                which, epoch, index, "/r", "r", [1, 500, "no", ""], _retry(random), _number(random, 99), deployment
            )
        case 1:
            return RecordIntent(which, epoch, index, "/r", "r", deployment)
        case 2:
            return RecordRunOutcome(which, epoch, index, _outcome(random))
        case 3:
            return AbandonStep(which, epoch, index)
        case _:
            op = random.choice(sorted(Op))
            outcome = _outcome(random) if random.random() < 0.4 else None
            child = list(_invoke(random)) if op in (Op.CALL, Op.SEND) and random.random() < 0.9 else None
            return RecordStep(which, epoch, index, op, "/s", _argument(random, op), outcome, deployment, child)


def _attempt(random: Random) -> Command:
    which, epoch = _ident(random), random.randrange(1, 4)
    match random.randrange(5):
        case 0:
            return Redispatch(which, epoch)
        case 3:
            return PostponeAttempt(which, epoch, [1, 503, "not now", ""], _number(random, 99))
        case 1:
            return SuspendAttempt(which, epoch, [_number(random, 5) for _ in range(random.randrange(3))])
        case 2:
            return Complete(which, epoch, _outcome(random), random.choice([None, DP_1]))
        case _:
            return FailAttempt(
                which, epoch, [1, 500, "no", ""], _retry(random), _number(random, 99), 0, random.random() < 0.3
            )


def _other(random: Random) -> Command:
    which = _ident(random)
    service, key, _ = _service(random)
    match random.randrange(15):
        case 0:
            return Announce(random.randrange(9), "n1")
        case 1:
            return Cancel(which)
        case 2:
            return Kill(which)
        case 3:
            return Pause(which)
        case 4:
            return Resume(which, random.choice([None, DP_2]))
        case 5:
            return Restart(which, random.choice([which, _ident(random)]), _number(random, 4), None)
        case 6:
            return Purge(which)
        case 7:
            return DecideStep(which, _number(random, 5), random.choice([None, _outcome(random)]))
        case 8:
            return CompleteStep(which, _number(random, 5), _outcome(random), secret=random.choice(SECRETS))
        case 9:
            return CompletePromise(service, key or "", random.choice(["x", "y"]), _outcome(random))
        case 10:
            values = {"x": random.choice([None, b"1"]), "z": _payload(random, b"2")}
            wanted = random.choice([None, b"1", _payload(random, b"2")])
            expect = {"x": None if wanted is None else fingerprint(wanted)} if random.random() < 0.3 else None
            return SetState(service, key or "", values, random.random() < 0.5, expect)
        case 11:
            return AttachTo(which, _ident(random), random.randrange(5))
        case 13:
            payload = random.choice([None, b"{}"])
            choice, by = random.choice(["yes", "no", "?"]), random.choice(["ann", "bob"])
            return Decide(which, _number(random, 5), random.choice(SECRETS), choice, by, by, payload=payload)
        case 12:
            messages = [encode_command(_invoke(random)), encode_command(Cancel(which))]
            return Deliver(PartitionNumber(random.randrange(2)), _number(random, 4), messages)
        case _:
            bytes_max = random.choice([5000, 2 * CHUNK_BYTES])
            limits = SetLimits(
                random.randrange(2, 30),
                random.randrange(100, 9000),
                random.randrange(9),
                bytes_max,
                bytes_max,
                random.randrange(5),
            )
            return (
                limits
                if random.random() < 0.1
                else TrimOutbox(PartitionNumber(random.randrange(2)), _number(random, 9))
            )


def _timers(random: Random) -> Command:
    return FireTimers(_number(random, 9))


def _blob(random: Random) -> Command:
    """A piece of a value, usually the right one."""
    ref, stored = refs.make(random.choice(BLOBS))
    index = random.randrange(-(-len(stored) // CHUNK_BYTES))
    data = bytes(stored[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
    match random.randrange(20):
        case 2 | 3 | 4 | 5 | 6:
            return KeepBlob(ref.data, random.choice(["", "0" * 13, object_name(bytes(40), 0, bytes(8))]))
        case 7:
            return ForgetObjects(random.choice([[], [object_name(ref.data, 1, bytes(8))], ["", "\u20ac"]]))
        case 0:
            return TouchBlob(random.choice([ref.data, b"", bytes(40)]), random.random() < 0.5)
        case 1:
            return PutBlob(ref.data, _number(random, 3), random.choice([data, b"", b"\x02" * len(data)]))
        case _:
            return PutBlob(ref.data, index, data)


def _hooks(random: Random) -> Command:
    if random.random() < 0.7:
        sequences = [_number(random, 9) for _ in range(random.randrange(3))]
        return ForgetNotices(random.choice([*HOOKS, HookId(b"unknown.")]), sequences, random.random() < 0.3)
    rows: list[list[Any]] = [
        [id_, random.randrange(64), random.choice([[], ["objects"], ["flows", "objects"]])]
        for id_ in random.sample([*HOOKS, b"short"], random.randrange(4))
    ]
    return SetHooks(_number(random, 300), rows)
