"""Run programs on several partitions in virtual time, while attempts, leaders and messages are lost and duplicated.

The state machine is the real one. The rest of a cluster is modelled in a few lines each: leaders that batch proposals,
carry out effects and change; handler processes that die, or live on although they are believed dead; clients that repeat
their requests until they get an answer. A second replica of each partition applies the same log in other transactions.

Now and then a value counts as large, whatever its size: then it is staged, and a reference is sent instead.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, assert_never

import msgpack

from holdfast.sdk.ids import NO_INVOCATION, InvocationId, PartitionNumber, new_id, partition_key, partition_of
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import attempts, queries, refs
from holdfast.statemachine.commands import (
    Announce,
    Batch,
    Cancel,
    Command,
    CompletePromise,
    CompleteStep,
    Decide,
    DecideStep,
    Deliver,
    FailAttempt,
    FireTimers,
    ForgetNotices,
    Invoke,
    Kill,
    Pause,
    Payload,
    PutBlob,
    Redispatch,
    Resume,
    Retry,
    SetHooks,
    TrimOutbox,
    decode_batch,
    encode_batch,
)
from holdfast.statemachine.effects import (
    AbortAttempt,
    Acknowledge,
    ArmTimer,
    Code,
    DeleteObjects,
    DeliverNotices,
    Effect,
    FlushOutbox,
    RecoverAttempt,
    Reply,
    Result,
    SendCancelled,
    SendCompletion,
    SendRetry,
    StartAttempt,
    Status,
)
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.state import State
from holdfast.statemachine.webhooks import COMPLETED, FAILED, HookId
from tests.statemachine import invariants
from tests.statemachine.attempt import RETENTION_MS, Attempt
from tests.statemachine.found import value_of
from tests.statemachine.programs import Root, ask_people, generate
from tests.statemachine.rig import T0

PARTITIONS = 3
FAULTY_MS = 4000  # Faults stop after this, so that everything can finish.
EVENTS_MAX = 300_000
FOREVER = 2**63
HOOK = HookId(b"the hook")
_EXPECTED = {Code.DONE, Code.UNCHANGED, Code.NOT_FOUND, Code.CONFLICT}


class Partition:
    def __init__(self, number: int) -> None:
        self.number = number
        self.txn, self.state = Memory(), State(number, PARTITIONS)
        self.log: list[bytes] = []
        self.leadership = 0  # Counts leaders: the plans of an older leader are not carried out.
        self.proposals: list[tuple[Command, Callable[[Result], None]]] = []
        self.armed_ms = FOREVER
        self.delivers = False
        self.live: dict[InvocationId, Attempt] = {}  # By invocation: the newest attempt that this leader started.


class Simulation:
    def __init__(
        self, seed: int, *, large: float = 0.2, sliced: bool = True, hooks: bool = False, people: bool = False
    ) -> None:
        self.random = Random(seed)
        self.large = large  # The probability that a value counts as large.
        #: The slices in which new leaders derive pending effects from state. None: all of them at once.
        self.slices = Random(f"slices of {seed}") if sliced else None
        self.hooks = hooks  # Whether a webhook is told how invocations end.
        #: What it was told, and how often: by partition and sequence.
        self.told: dict[tuple[int, int], list[queries.Notice]] = {}
        self.now_ms = T0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        self.partitions = [Partition(number) for number in range(PARTITIONS)]
        self.roots, self.model = generate(self.random)
        #: How often a decision was taken, and how often it came too late or had no right to be made.
        self.taken: Counter[tuple[InvocationId, int]] = Counter()
        self.refused = 0
        if people:  # They decide where otherwise a client completes an awakeable.
            for root in self.roots:
                ask_people(root.body)
        self.idents: dict[int, InvocationId] = {}
        self.outcomes: dict[InvocationId, list[Any]] = {}
        self.carried_out: Counter[tuple[InvocationId, str]] = Counter()
        self.once: Counter[tuple[InvocationId, str]] = Counter()
        self.invoked: set[InvocationId] = set()
        self.faults: Counter[str] = Counter()

    # -- time ----------------------------------------------------------------------------------------------------------

    def after(self, ms: int, then: Callable[[], None]) -> None:
        self.at(self.now_ms + ms, then)

    def at(self, due_ms: int, then: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (max(due_ms, self.now_ms), self.count, then))

    def chance(self, name: str, probability: float) -> bool:
        happens = self.now_ms < T0 + FAULTY_MS and self.random.random() < probability
        self.faults[name] += happens
        return happens

    def run(self) -> None:
        for partition in self.partitions:
            self.lead(partition)
            for _ in range(self.random.randrange(4)):
                self.after(self.random.randrange(FAULTY_MS), partial(self.fail_over, partition))
        for root in self.roots:
            self.begin(root)
        for key, value in self.model.promises.items():
            command = CompletePromise("flows", key, "p", [0, str(value).encode()])
            partition = self.partitions[partition_of(partition_key("flows", key), PARTITIONS)]
            self.after(self.random.randrange(800), partial(self.request, partition, command))
        handled = 0
        while self.events:
            self.now_ms, _, then = heapq.heappop(self.events)
            then()
            handled += 1
            assert handled < EVENTS_MAX, "it does not come to an end"

    # -- clients ---------------------------------------------------------------------------------------------------------

    def begin(self, root: Root) -> None:
        ident = new_id("objects", root.key, self.random.randbytes(16))
        self.idents[root.number] = ident
        partition = self.partitions[partition_of(ident, PARTITIONS)]
        invoke = Invoke(
            ident, "objects", "play", root.key, root.mode, msgpack.packb(root.body), {}, 0, None, -1, RETENTION_MS
        )
        for _ in range(self.random.randrange(1, 3)):  # A user clicks twice.
            self.after(root.start_ms + self.random.randrange(50), lambda: self.request(partition, invoke))
        if root.ending:
            command = Cancel(ident) if root.ending == "cancel" else Kill(ident)
            self.after(
                root.start_ms + root.ending_ms, lambda: self.request(partition, command, until=lambda r: r.code != 404)
            )

    def request(
        self, partition: Partition, command: Command, *, until: Callable[[Result], bool] = lambda result: True
    ) -> None:
        """Repeat the request until there is an answer: the proposals of a lost leader are lost too."""
        answered: list[Result] = []

        def again() -> None:
            if not any(until(result) for result in answered):
                self.request(partition, command, until=until)

        self.propose(partition, command, answered.append)
        self.after(300, again)

    def promise_awakeable(self, ident: InvocationId, index: int, value: int, secret: bytes) -> None:
        partition = self.partitions[partition_of(ident, PARTITIONS)]
        command = CompleteStep(ident, index, [0, str(value).encode()], secret=secret)
        self.after(self.random.randrange(300), lambda: self.request(partition, command))

    def ask_people(self, ident: InvocationId, index: int, value: int, secret: bytes) -> None:
        """Several decide at about the same time, and somebody who does not know the secret tries to."""
        partition = self.partitions[partition_of(ident, PARTITIONS)]

        def count(result: Result) -> bool:
            self.taken[ident, index] += result.code == Code.DONE
            self.refused += result.code in (Code.NOT_FOUND, Code.CONFLICT)
            return True

        for by, known, choice in (
            ("ann", secret, str(value)),
            ("bob", secret, str(value)),
            ("eve", bytes(8), "never chosen"),
        ):
            command = Decide(ident, index, secret=known, choice=choice, by=by, by_id=by)
            self.after(self.random.randrange(600), partial(self.request, partition, command, until=count))

    # -- leaders ---------------------------------------------------------------------------------------------------------

    def propose(
        self, partition: Partition, command: Command, answer: Callable[[Result], None] = lambda result: None
    ) -> None:
        first = not partition.proposals
        partition.proposals.append((self.detached(partition, command), answer))
        if first:
            self.after(self.random.randrange(1, 4), lambda: self.commit(partition))

    def detached(self, partition: Partition, command: Command) -> Command:
        """Stage some of its values before the command. A lost leader may lose the command but not the values."""
        new: list[Payload] = []
        for payload in refs.payloads(command):
            if self.large and isinstance(payload, bytes) and len(payload) > 1 and self.random.random() < self.large:
                ref, stored = refs.make(payload)
                partition.proposals.append((PutBlob(ref.data, 0, bytes(stored)), lambda result: None))
                payload = ref
            new.append(payload)
        return refs.replaced(command, new)

    def commit(self, partition: Partition) -> None:
        """One turn: all proposals become one entry, which is applied in one transaction."""
        taken, partition.proposals = partition.proposals, []
        if not taken:
            return
        skew_ms = self.random.randrange(-5, 1)  # Leaders' clocks differ a little, and never run ahead of the true time.
        raw = encode_batch(Batch(b"", 0, self.now_ms + skew_ms, [command for command, _ in taken]))
        partition.log.append(raw)
        batch = decode_batch(raw)
        partition.state.begin(partition.txn)
        results = [apply(partition.state, batch.now_ms, command) for command in batch.commands]
        partition.state.flush()
        if self.random.random() < 0.05:
            invariants.check(partition.txn)
        for (command, answer), result in zip(taken, results, strict=True):
            self.look_at(partition, command, result)
            answer(result)
        for effect in partition.state.take_effects():
            self.note(partition, effect)
            self.carry_effect_out(partition, effect)
            if self.chance("doubled effect", 0.02):
                self.carry_effect_out(partition, effect)

    def lead(self, partition: Partition) -> None:
        leadership = partition.leadership

        def announced(result: Result) -> None:
            if partition.leadership != leadership:
                return
            if self.slices is None:
                derive(b"", 1_000_000)
            else:  # After the effects of the batch with the announcement.
                self.later(partition, 0, partial(derive, b"", self.slices.randrange(1, 3)))

        def derive(after_id: bytes, limit: int) -> None:
            effects, following = queries.pending_effects(partition.txn, after_id, limit)
            for effect in effects:
                self.carry_effect_out(partition, effect)
            if following is not None and self.slices is not None:
                self.later(partition, self.slices.randrange(3), partial(derive, following, limit))

        self.propose(partition, Announce(leadership + 1, f"n{leadership}"), announced)
        if self.hooks:
            self.propose(partition, SetHooks(1, [[HOOK, FAILED | COMPLETED, []]]))

    def fail_over(self, partition: Partition) -> None:
        """The knowledge of the old leader is lost; some of its attempts live on without noticing."""
        self.faults["fail-over"] += 1
        partition.leadership += 1
        partition.armed_ms = FOREVER
        kept = self.random.randrange(len(partition.proposals) + 1)
        partition.proposals = partition.proposals[:kept]  # Some proposals had been sent to the disks.
        for attempt in partition.live.values():
            if self.random.random() < 0.5:
                attempt.is_over = True
        partition.live.clear()
        partition.delivers = False
        self.lead(partition)
        self.after(1, lambda: self.commit(partition))

    def later(self, partition: Partition, ms: int, then: Callable[[], None]) -> None:
        """Do it later, unless the leader has changed by then."""
        leadership = partition.leadership
        self.after(ms, lambda: then() if partition.leadership == leadership else None)

    def carry_effect_out(self, partition: Partition, effect: Effect) -> None:
        match effect:
            case ArmTimer(due_ms):
                self.arm(partition, due_ms)
            case FlushOutbox(target):
                self.later(partition, self.random.randrange(5), lambda: self.flush(partition, target))
            case StartAttempt(ident, epoch):
                self.start(partition, ident, epoch)
            case RecoverAttempt(ident, epoch):
                known = partition.live.get(ident)
                if known is None or known.epoch < epoch:
                    self.propose(partition, Redispatch(ident, epoch))
            case Acknowledge(ident, epoch, length):
                self.tell(partition, ident, epoch, lambda attempt: attempt.on_acknowledge(length))
            case SendCompletion(ident, epoch, index, _, outcome):
                whole = queries.whole_outcome(partition.txn, outcome) or []
                self.tell(partition, ident, epoch, lambda attempt: attempt.on_completion(index, whole))
            case SendRetry(ident, epoch, index, order):
                attempt = partition.live.get(ident)
                if attempt is None or order > attempt.order:  # Otherwise it learned that from the journal.
                    self.tell(partition, ident, epoch, lambda attempt: attempt.on_retry(index))
            case SendCancelled(ident, epoch, order):
                attempt = partition.live.get(ident)
                if attempt is None or order > attempt.order:
                    self.tell(partition, ident, epoch, lambda attempt: attempt.on_cancelled())
            case AbortAttempt(ident, epoch):
                self.tell(partition, ident, epoch, self.stop)
            case DeliverNotices():
                self.deliver(partition)
            case Reply() | DeleteObjects():
                pass
            case _:
                assert_never(effect)

    def arm(self, partition: Partition, due_ms: int) -> None:
        if due_ms >= partition.armed_ms:
            return
        partition.armed_ms = due_ms

        def fire() -> None:
            partition.armed_ms = FOREVER
            self.propose(partition, FireTimers(self.random.randrange(1, 6)))

        self.later(partition, max(due_ms - self.now_ms, 0), fire)

    def flush(self, partition: Partition, target: int) -> None:
        """Send the outbox, and check later whether it was delivered."""
        first, messages = queries.outbox(partition.txn, PartitionNumber(target), 0, self.random.randrange(1, 5))
        if not messages:
            return
        last = first + len(messages) - 1

        def taken(result: Result) -> None:
            if result.code in (0, 200):
                self.later(
                    partition, 1, lambda: self.propose(partition, TrimOutbox(PartitionNumber(target), last), trimmed)
                )

        def trimmed(result: Result) -> None:
            self.later(partition, 1, lambda: self.flush(partition, target))

        staged = [
            ref for _, held in queries.parcels(partition.txn, PartitionNumber(target), first, last) for ref in held
        ]
        pieces = [PutBlob(ref.data, 0, queries.chunk(partition.txn, ref.data, 0)) for ref in staged]

        def carry() -> None:
            for piece in pieces:
                if not self.chance("lost piece", 0.1):
                    self.propose(self.partitions[target], piece)
            self.propose(self.partitions[target], Deliver(PartitionNumber(partition.number), first, messages), taken)

        for _ in range(1 + self.chance("doubled delivery", 0.1)):
            if not self.chance("lost delivery", 0.1):
                self.after(self.random.randrange(1, 20), carry)
        self.later(partition, 200, lambda: self.flush(partition, target))

    def deliver(self, partition: Partition) -> None:
        """Tell the webhook what waits for it, and forget that a while later. A leader that fails in between leaves it to the
        next one."""
        notices = queries.notices(partition.txn, HOOK, self.random.randrange(1, 4))
        if partition.delivers or not notices:
            return
        partition.delivers = True
        for notice in notices:
            self.told.setdefault((partition.number, notice.sequence), []).append(notice)

        def forgotten(_: Result) -> None:
            partition.delivers = False
            self.later(partition, 1, lambda: self.deliver(partition))

        forget = ForgetNotices(HOOK, [notice.sequence for notice in notices])
        self.later(partition, self.random.randrange(1000), lambda: self.propose(partition, forget, forgotten))

    # -- handlers --------------------------------------------------------------------------------------------------------

    def start(self, partition: Partition, ident: InvocationId, epoch: int) -> None:
        record = queries.load(partition.txn, ident)
        if record is None or record.epoch != epoch or record.status != Status.RUNNING:
            return
        known = partition.live.get(ident)
        if known is not None and known.epoch >= epoch:
            return
        journal = [queries.whole_step(partition.txn, raw) for raw in queries.journal(partition.txn, ident, 0, 10_000)]
        attempt = Attempt(
            self, record, epoch, journal, cancelled=record.cancelled, partitions=PARTITIONS, secrets=ident[-1] % 4 > 0
        )
        attempt.said_ms = attempt.heard_ms = self.now_ms
        partition.live[ident] = attempt
        if known is not None and self.random.random() < 0.8:
            known.is_over = True  # An SDK ends an older attempt when it sees a newer one; on another host it cannot.
        self.tell(partition, ident, epoch, lambda attempt: attempt.begin())

    def tell(self, partition: Partition, ident: InvocationId, epoch: int, what: Callable[[Attempt], None]) -> None:
        """Deliver a frame to the handler: in order, after a while."""
        attempt = partition.live.get(ident)
        if attempt is None or attempt.epoch != epoch:
            return
        attempt.heard_ms = max(attempt.heard_ms, self.now_ms + self.random.randrange(1, 20))

        def arrive() -> None:
            if attempt.is_over:
                return
            if self.chance("lost attempt", 0.02):
                self.lose(attempt)
            elif self.chance("failed attempt", 0.01):
                failure = [1, 500, "it crashed", "RuntimeError"]
                self.send(attempt, FailAttempt(ident, epoch, failure, Retry(20, 2000, 200, 0), 0, 0, False))
                attempt.is_over = True
            else:
                what(attempt)
                self.after(self.random.choice([5, 30, 100]), attempt.maybe_suspend)

        self.at(attempt.heard_ms, arrive)

    def stop(self, attempt: Attempt) -> None:
        attempt.is_over = True

    def lose(self, attempt: Attempt, *, dies: bool = True) -> None:
        """Break its stream: the leader starts another attempt. The old attempt may still be alive."""
        attempt.is_over = attempt.is_over or dies
        partition = self.partitions[partition_of(attempt.id, PARTITIONS)]
        self.later(partition, 10, lambda: self.propose(partition, Redispatch(attempt.id, attempt.epoch)))

    def send(self, attempt: Attempt, command: Command) -> None:
        """Deliver a frame to the current leader, whichever it is by then."""
        partition = self.partitions[partition_of(attempt.id, PARTITIONS)]
        attempt.said_ms = max(attempt.said_ms, self.now_ms + self.random.randrange(1, 15))
        self.at(attempt.said_ms, lambda: self.propose(partition, command))
        if self.chance("zombie", 0.01):
            self.lose(attempt, dies=False)
        if self.chance("pause", 0.005):
            self.after(5, lambda: self.request(partition, Pause(attempt.id)))
            self.after(300, lambda: self.request(partition, Resume(attempt.id, None)))

    def carry_out(self, attempt: Attempt, key: str, *, once: bool = False) -> bool:
        partition = self.partitions[partition_of(attempt.id, PARTITIONS)]
        record = queries.load(partition.txn, attempt.id)
        if record is not None and record.epoch == attempt.epoch and record.status == Status.RUNNING:
            done = [
                step.key
                for step in map(unpack_step, queries.journal(partition.txn, attempt.id, 0, 10_000))
                if step.done
            ]
            assert key not in done, f"{key} ran again although its result is journaled"
        if self.chance("died before an effect", 0.02):
            self.lose(attempt)
            return False
        self.carried_out[attempt.id, key] += 1
        self.once[attempt.id, key] += once
        if self.chance("died after an effect", 0.03):
            self.lose(attempt)
            return False
        return True

    # -- observations ----------------------------------------------------------------------------------------------------

    def look_at(self, partition: Partition, command: Command, result: Result) -> None:
        assert result.code in _EXPECTED or (result.code == Code.VALUE_MISSING and type(command) is Deliver), result
        attempt = partition.live.get(getattr(command, "id", NO_INVOCATION))
        if result.code == 409 and attempt is not None and attempt.epoch == getattr(command, "epoch", 0):
            # An attempt of the old leader may have lost a step with it. An attempt of this leader has not.
            assert result.message in (attempts.STALE.message, attempts.DONE.message), (command, result)
        if isinstance(command, Invoke) and result.code == 0:
            assert command.id not in self.invoked, "an id is invoked once"
            self.invoked.add(command.id)
        if isinstance(command, FailAttempt) and result.code == 0 and command.pause:
            self.after(1000, lambda: self.decide(partition, command.id))

    def decide(self, partition: Partition, ident: InvocationId) -> None:
        """An operator checks the outside world and decides whether a run in doubt took place."""
        for index, step in queries.waiting_steps(partition.txn, ident, 100):
            op, key, argument = step[:3]
            if op == Op.RUN and len(argument) == 1:
                body = value_of(partition.txn, ident, key)
                happened = self.carried_out[ident, key]
                outcome = [0, str(body).encode()] if happened else None
                self.request(partition, DecideStep(ident, index, outcome))

    def note(self, partition: Partition, effect: Effect) -> None:
        if isinstance(effect, Reply):
            assert effect.id not in self.outcomes, "an invocation completes once"
            self.outcomes[effect.id] = queries.whole_outcome(partition.txn, effect.outcome) or []
