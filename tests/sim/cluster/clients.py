"""The outside world: clients of the ingress, completions of promises and awakeables, and an operator.

Each sends its request to a running node, and to another one when the connection breaks or a timeout passes. Requests go
through the real ingress, behind its listener.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgpack

from holdfast.cluster.errors import Circumstance
from holdfast.cluster.http.exchange import Answer, Exchange
from holdfast.cluster.members.operations import Operations
from holdfast.cluster.node import Node
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import InvocationId, format_id, idempotent_id
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Cancel, Command, DecideStep, Kill, Pause, Resume
from holdfast.statemachine.effects import Result, Status
from tests.sim.cluster.handlers import URI
from tests.sim.cluster.loop import SimLoop
from tests.statemachine.found import value_of
from tests.statemachine.programs import Root, ask_people, generate

if TYPE_CHECKING:
    from tests.sim.cluster.oracle import Reference
    from tests.sim.cluster.world import Process, World

#: Refusals that a client of a live node may get without a majority: there is no leader, or not yet.
RETRYABLE: Final = frozenset({503, 504})
#: A refusal is wrong if there was no trouble for this long before the request.
CALM_S: Final = 1.0
OPERATOR_S: Final = 0.5
DECIDES_AFTER_S: Final = 2.5  # By then, an attempt has finished everything that it was about to do.


class Body:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.length: int | None = len(raw)

    def whole(self) -> bytes | None:
        return self.raw

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.raw


class Asking:
    """One request, sent to one node after the other until `on_answer` is satisfied."""

    def __init__(
        self,
        world: World,
        request: Callable[[Node], Coroutine[Any, Any, Any]],
        on_answer: Callable[[Any, Process], bool],
        *,
        impatient: float = 0.0,
    ) -> None:
        self.world = world
        self.done = False
        self._request = request
        self._on_answer = on_answer
        self._impatient = impatient
        self._try = 0
        self._asked_at = 0.0
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        world = self.world
        if self.done:
            return  # It was abandoned before it began.
        self._try += 1
        self._task = None
        serving = world.serving()
        if not serving:
            world.after(world.rng.uniform(0.02, 0.2), self.begin)
            return
        process = world.rng.choice(serving)
        number, self._asked_at = self._try, world.now
        process.run(partial(self._ask, process, number))
        process.on_death.append(partial(self._lost, number))
        if world.rng.random() < self._impatient:
            world.after(world.rng.uniform(0.05, 3.0), partial(self._give_up, process, number))

    def _ask(self, process: Process, number: int) -> None:
        node = process.node
        assert node is not None
        self._task = asyncio.get_running_loop().create_task(self._request(node))
        self._task.add_done_callback(partial(self._answered, process, number))

    def _answered(self, process: Process, number: int, task: asyncio.Task[Any]) -> None:
        if self.done or number != self._try or task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, ProposalError | TimeoutError):
            self.world.violate(f"{process.name} fails a request: {error!r}")
            return
        if error is None:
            process.calm = self.world.is_calm(process, self._asked_at - CALM_S)
            if self._on_answer(task.result(), process):
                self.done = True
                return
        if error is not None:
            self.world.counts[f"refused: {type(error).__name__}"] += 1
        self._again(number)

    def _lost(self, number: int) -> None:
        if not self.done and number == self._try:
            self.world.counts["connections lost"] += 1
            self._again(number)

    def _give_up(self, process: Process, number: int) -> None:
        """The client closes its connection, and tries another node."""
        if not self.done and number == self._try and self.world.is_faulty:
            self.world.counts["clients impatient"] += 1
            if self._task is not None:
                process.run(self._task.cancel)
            self._again(number)

    def _again(self, number: int) -> None:
        self._try = number + 1
        self.world.after(self.world.rng.uniform(0.01, 0.2), self.begin)


def _door() -> Exchange:
    """Of the process that runs now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop) and loop.process.door is not None, "it serves"
    return loop.process.door


class Clients:
    def __init__(self, world: World) -> None:
        self.world = world
        self.roots, self.model = generate(world.rng, world.profile.programs)
        if world.profile.people:
            for root in self.roots:
                ask_people(root.body)
        self.outcomes = {root.number: self.model.outcome_of(root) for root in self.roots}
        self.idents = {root.number: self._ident(root) for root in self.roots}
        self.asking: list[Asking] = []
        self.registered: set[str] = set()
        self.began_at: float | None = None
        self._paused_since: dict[InvocationId, float] = {}
        self._deciding: dict[InvocationId, Asking] = {}
        world.handlers.resolve = self.resolve
        world.handlers.decide = self.decide

    def open(self) -> None:
        self.register(URI, then=self.begin)
        self.world.after(OPERATOR_S, self.operate)

    @property
    def answered(self) -> bool:
        return self.began_at is not None and all(asking.done for asking in self.asking)

    def ask(self, request: Any, on_answer: Any, *, delay: float = 0.0, impatient: float = 0.0) -> Asking:
        asking = Asking(self.world, request, on_answer, impatient=impatient)
        self.asking.append(asking)
        self.world.after(delay, asking.begin)
        return asking

    # -- deployments -----------------------------------------------------------------------------------------------------

    def register(self, uri: str, *, then: Callable[[], None] = lambda: None, delay: float = 0.0) -> None:
        def registered(answer: Any, process: Process) -> bool:
            self.registered.add(uri)
            then()
            return True

        self.ask(lambda node: node.ground.registry.register(uri), registered, delay=delay)

    # -- programs --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        world = self.world
        self.began_at = world.now
        self.submit(world.profile.faulty_s)
        for number in range(world.rng.randrange(3)):
            self.register(f"http://other:{9001 + number}", delay=world.rng.uniform(0, world.profile.faulty_s))

    def submit(self, seconds: float) -> None:
        """Send all requests within a period of time."""
        world = self.world
        for root in self.roots:
            begins = root.start_ms / 1000 + world.rng.uniform(0, 0.7) * seconds
            for _ in range(1 + (world.rng.random() < 0.3)):  # A double click.
                self.start(root, begins + world.rng.uniform(0, 0.05))
            if root.ending:
                self.end(root, begins + root.ending_ms / 1000)
        for key, value in self.model.promises.items():
            path = f"/holdfast/workflow/flows/{key}/promises/p/resolve"
            self.post(path, str(value).encode(), delay=world.rng.uniform(0, 0.8) * seconds)

    def give_up(self) -> None:
        """The cluster is lost. No client waits any more, and requests may be half done, done or neither."""
        for asking in self.asking:
            self.world.counts["requests lost with the cluster"] += not asking.done
            asking.done = True
        self._paused_since.clear()
        self._deciding.clear()

    def begin_again(self, seconds: float) -> None:
        """There is a cluster again, without the work since its backup. Clients that do not know what was done repeat
        everything with the same idempotency keys: work in the backup is not repeated, the rest is done."""
        uris, self.registered = sorted(self.registered), set()
        for uri in uris:
            self.register(uri, delay=self.world.rng.uniform(0, seconds))
        self.submit(seconds)

    @staticmethod
    def _place(root: Root) -> tuple[str, str | None]:
        return ("tasks", None) if root.key is None else ("objects", root.key)

    def _ident(self, root: Root) -> InvocationId:
        service, key = self._place(root)
        return idempotent_id(service, key, "play", f"root-{root.number}")

    def start(self, root: Root, delay: float) -> None:
        """Call and wait, or send and attach later, possibly at another node."""
        service, key = self._place(root)
        path = f"/{service}/{key}/play" if key is not None else f"/{service}/play"
        headers = {"Idempotency-Key": f"root-{root.number}"}
        body = msgpack.packb(root.body)
        attach = f"/holdfast/invocation/{format_id(self.idents[root.number])}/attach"

        def told(answer: Answer, process: Process) -> bool:
            return self.told(root, answer, process)

        def attached(answer: Answer, process: Process) -> bool:
            if answer.status == 404 and json.loads(answer.body)["source"] == "ingress":
                self.world.violate(f"{process.name} does not know {answer.id}, which was accepted")
            return self.told(root, answer, process)

        def accepted(answer: Answer, process: Process) -> bool:
            if answer.status != 202:
                return self.refused(answer, process)
            self.ask(
                lambda node: _door().answer("GET", attach, {}, Body(b"")),
                attached,
                delay=self.world.rng.uniform(0, 1.0),
                impatient=0.3,
            )
            return True

        if self.world.rng.random() < 0.3:
            self.ask(lambda node: _door().answer("POST", path + "/send", headers, Body(body)), accepted, delay=delay)
        else:
            self.ask(lambda node: _door().answer("POST", path, headers, Body(body)), told, delay=delay, impatient=0.3)

    def told(self, root: Root, answer: Answer, process: Process) -> bool:
        outcome = self.outcomes[root.number]
        if answer.status == 200:
            heard: list[Any] = [0, answer.body]
        else:
            error = json.loads(answer.body)
            if error["source"] == "ingress":
                return self.refused(answer, process)
            heard = [1, error["code"], error["message"], outcome[3] if len(outcome) > 3 else ""]
        if heard != outcome:
            self.world.violate(f"root {root.number} ended with {heard}, and should have with {outcome}")
        else:
            self.world.oracle.was_told(self.idents[root.number], outcome)
            self.world.counts["clients told"] += 1
        return True

    def refused(self, answer: Answer, process: Process) -> bool:
        """False: the request must be repeated."""
        self.world.counts[f"answers {answer.status}"] += 1
        unknown_yet = answer.status == 404 and b"there is no service" in answer.body
        if answer.status in RETRYABLE and process.calm and process.serving:
            self.world.violate(f"{process.name} answers {answer.status} although all is well: {answer.body!r}")
        if answer.status not in RETRYABLE and not unknown_yet:
            self.world.violate(f"{process.name} answers {answer.status}: {answer.body!r}")
        return False

    def post(self, path: str, raw: bytes, *, delay: float) -> None:
        def completed(answer: Answer, process: Process) -> bool:
            if answer.status == 404 and b"there is no service" not in answer.body:
                return True  # Its caller is gone.
            return answer.status in (200, 202, 204, 409) or self.refused(answer, process)

        self.ask(lambda node: _door().answer("POST", path, {}, Body(raw)), completed, delay=delay)

    def resolve(self, awakeable: str, value: int) -> None:
        self.post(f"/holdfast/awakeables/{awakeable}/resolve", str(value).encode(), delay=0.0)

    def decide(self, approval: str, value: int, comment: str) -> None:
        """Several may decide, on several nodes: the first one counts."""
        body = json.dumps({"choice": str(value), "comment": comment}).encode()
        self.post(f"/holdfast/approvals/{approval}", body, delay=0.0)

    def end(self, root: Root, delay: float) -> None:
        ident = self.idents[root.number]
        command: Command = Cancel(ident) if root.ending == "cancel" else Kill(ident)
        self.ask(
            lambda node: node.serving.router.submit(ident, command),
            lambda result, process: result.code != 404,
            delay=delay,
        )

    # -- members ---------------------------------------------------------------------------------------------------------

    def operate_on(
        self,
        action: Callable[[Operations], Coroutine[Any, Any, Any]],
        what: str,
        then: Callable[[Circumstance | None], None] = lambda refusal: None,
        *,
        delay: float = 0.0,
    ) -> None:
        """Change the members of the cluster, at any answering node, until it is done or refused for good."""

        async def act(node: Node) -> Circumstance | None:
            try:
                await action(node.serving.operations)
            except Circumstance as refusal:
                return refusal
            return None

        def acted(refusal: Circumstance | None, process: Process) -> bool:
            if refusal is not None and refusal.retryable:
                return False
            self.world.counts[what if refusal is None else f"{what} refused"] += 1
            then(refusal)
            return True

        self.ask(act, acted, delay=delay)

    # -- the operator ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause an invocation; the operator resumes it later."""
        running = [record.id for reference in self.world.oracle.references for record in reference.active()]
        if running:
            ident = self.world.rng.choice(running)
            self.ask(lambda node: node.serving.router.submit(ident, Pause(ident)), lambda result, process: True)

    def operate(self) -> None:
        """Check paused invocations: decide steps in doubt, and resume the others."""
        world = self.world
        world.after(OPERATOR_S, self.operate)
        paused = set()
        for reference in world.oracle.references:
            for record in reference.active():
                if record.status != Status.PAUSED:
                    continue
                paused.add(record.id)
                since = self._paused_since.setdefault(record.id, world.now)
                busy = self._deciding.get(record.id)
                if world.now - since >= DECIDES_AFTER_S and (busy is None or busy.done):
                    self._decide(reference, record.id)
        for ident in self._paused_since.keys() - paused:
            del self._paused_since[ident]

    def _decide(self, reference: Reference, ident: InvocationId) -> None:
        failure = queries.last_failure(reference.txn, ident)
        if failure is not None and failure.kind in ("NoDeployment", "ValueLost"):
            self.world.violate(f"{ident.hex()} is paused: {failure}")
        command: Command = Resume(ident, None)
        for index, step in queries.waiting_steps(reference.txn, ident, 100):
            op, key, argument = step[:3]
            if op == Op.RUN and len(argument) == 1:
                happened = self.world.handlers.carried_out[ident, key]
                whole = partial(self.world.oracle.whole, reference)
                outcome = [0, str(value_of(reference.txn, ident, key, whole)).encode()] if happened else None
                command = DecideStep(ident, index, outcome)
                break
        self.world.counts["operator acts"] += 1

        def acted(result: Result, process: Process) -> bool:
            return True

        self._deciding[ident] = self.ask(lambda node: self._submit(node, ident, command), acted)

    @staticmethod
    async def _submit(node: Node, ident: InvocationId, command: Command) -> Result | None:
        """If the outcome is unknown, the operator checks again."""
        try:
            return await node.serving.router.submit(ident, command)
        except ProposalError:
            return None
