"""A second handler protocol beside the own one: what a node asks of it is in this file, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from holdfast.cluster.errors import EndpointFailed, Unavailable
from holdfast.cluster.handlers.attempts import Attempt, Opening
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.large import LargeOutcome, LargeSteps
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.native.protocol import Native
from holdfast.cluster.handlers.protocols.table import Protocols, known_protocols
from holdfast.cluster.handlers.recording import Recorder
from holdfast.cluster.registry.offer import Offer
from holdfast.cluster.registry.registry import Registry
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine.commands import Command
from holdfast.statemachine.meta import NATIVE, Deployment, Handler, Service
from holdfast.statemachine.outcomes import failed
from tests.cluster.harness import World, echo, eventually, world
from tests.cluster.rig import registry

HERE = "http://in.this.process"


class Recorded(NamedTuple):
    """A step, as a protocol reports it."""

    index: int  # type: ignore[assignment]
    op: int
    argument: list[Any]
    outcome: list[Any] | None = None
    key: str = ""
    began_ms: int = 0


class Suspended(Exception):
    """The code waits for something that has no outcome yet."""


class Code:
    """What a handler gets: its input, and steps that are replayed from the journal or recorded."""

    def __init__(self, record: Callable[[Recorded], None], journal: list[bytes]) -> None:
        self._record = record
        self._journal = [unpack_step(raw) for raw in journal]
        self._next = 0
        self.waits_for = 0
        self.input: bytes = self._step(Op.INPUT, [])[1]

    def run(self, name: str, function: Callable[[], bytes]) -> bytes:
        if self._next < len(self._journal):
            return self._value(self._step(Op.RUN, [name]))
        return self._value(self._step(Op.RUN, [name], [0, function()]))

    def sleep(self, milliseconds: int) -> None:
        self._step(Op.SLEEP, [milliseconds])

    def call(self, service: str, handler: str, payload: bytes) -> bytes:
        return self._value(self._step(Op.CALL, [service, handler, None, payload, {}]))

    @staticmethod
    def _value(outcome: list[Any]) -> bytes:
        assert outcome[0] == 0, outcome
        value: bytes = outcome[1]
        return value

    def _step(self, op: int, argument: list[Any], outcome: list[Any] | None = None) -> list[Any]:
        index, self._next = self._next, self._next + 1
        if index < len(self._journal):
            assert self._journal[index].op == op, "the code is deterministic"
            outcome = self._journal[index].outcome
        else:
            self._record(Recorded(index, op, argument, outcome, key=f"0/{op}/{index}"))
        if outcome is None:
            self.waits_for = index
            raise Suspended
        return outcome


Function = Callable[[Code], Awaitable[bytes]]


class InThisProcess:
    """Handlers are coroutines of the node's own process. One object is the protocol, the connector and the carrier."""

    connected = True
    stall = None
    attempts_max = 100
    can_start = True
    drains = False

    def __init__(self, handlers: dict[str, Function]) -> None:
        self.attempts: dict[InvocationId, Attempt] = {}
        self._handlers = handlers
        self._station: Station
        self._recorder: Recorder

    async def discover(self, uri: str) -> Offer:
        if uri != HERE:
            raise EndpointFailed(f"{uri} is not in this process")
        services = [Service("here", "service", [Handler(name, "plain") for name in self._handlers])]
        return Offer(services, "none", ["here"], [7, 7])

    def connector(self, station: Station) -> InThisProcess:
        self._station = station
        self._recorder = Recorder(station.invoker.registry, station.invoker.rng)
        return self

    async def connect(self, deployment: Deployment) -> InThisProcess:
        return self

    def begin(self, attempt: Attempt, opening: Opening) -> None:
        self.attempts[attempt.id] = attempt
        self._station.began(attempt)
        attempt.session = asyncio.get_running_loop().create_task(self._run(attempt, opening))

    async def _run(self, attempt: Attempt, opening: Opening) -> None:
        invoker, recorder = self._station.invoker, self._recorder
        large = LargeSteps(attempt.partition, opening.steps, sum(opening.sizes))
        async with self._station.loads.loaded(large) as journal:
            code = Code(
                lambda step: invoker.submit(attempt, recorder.step(attempt, step, is_fresh=True), last=False), journal
            )
        last: Command
        try:
            output = await self._handlers[opening.handler](code)
        except Suspended:
            last = recorder.suspended(attempt, [code.waits_for])
        except Exception as error:
            last = recorder.failed(attempt, failed(500, str(error), type(error).__name__))
        else:
            last = recorder.completed(attempt, [0, output], notices=False)
        invoker.submit(attempt, last, last=True)

    def abort(self, attempt: Attempt, reason: str) -> None:
        attempt.session.cancel()

    def let_go(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
            self._station.let_go(attempt)

    def owes(self, attempt: Attempt) -> bool:
        return False

    # An attempt suspends whenever it waits, and the next one finds all of this in its journal.

    def acknowledge(self, attempt: Attempt) -> None: ...

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any] | LargeOutcome) -> None: ...

    def retry(self, attempt: Attempt, step: int) -> None: ...

    def cancelled(self, attempt: Attempt) -> None: ...

    def suspend(self, attempt: Attempt) -> None: ...

    async def close(self) -> None: ...


def speaking(handlers: dict[str, Function]) -> Callable[[Means], Protocols]:
    return lambda means: Protocols({"in-process": InThisProcess(handlers), NATIVE: Native(means)})


async def started(path: Path, handlers: dict[str, Function]) -> World:
    it = World(path)
    it.protocols = speaking(handlers)
    await it.start()
    return it


async def test_handlers_of_two_protocols_call_each_other(tmp_path: Path) -> None:
    ran: list[str] = []

    async def trip(code: Code) -> bytes:
        seat = code.run("reserve", lambda: ran.append("reserve") or b"12A")  # type: ignore[func-returns-value]
        code.sleep(50)
        return code.call("native", "echo", code.input + b" " + seat)

    it = await started(tmp_path, {"trip": trip})
    try:
        here = (await it.node.ground.registry.register(HERE)).deployment
        native = await it.register({"native/echo": echo})

        assert await it.call("here/trip", b"seat") == [0, b"seat 12A"]

        assert ran == ["reserve"], "a recorded step does not run again"
        assert here.protocol_name == "in-process"
        there = it.node.ground.registry.deployment(it.node.ground.registry.resolve("native", "echo").deployment)
        assert there is not None and (there.uri, there.protocol_name) == (native.uri, NATIVE)
    finally:
        await it.stop()


async def test_a_failed_attempt_is_retried_whatever_its_protocol(tmp_path: Path) -> None:
    attempts = 0

    async def third_time_lucky(code: Code) -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise RuntimeError("not yet")
        return b"%d" % attempts

    it = await started(tmp_path, {"try": third_time_lucky})
    try:
        await it.node.ground.registry.register(HERE)

        assert await it.call("here/try") == [0, b"3"]
    finally:
        await it.stop()


async def test_large_values_are_whole_when_a_protocol_gets_them(tmp_path: Path) -> None:
    async def double(code: Code) -> bytes:
        code.sleep(10)  # The next attempt reads the input from the state.
        return code.run("double", lambda: code.input * 2)

    large = bytes(range(256)) * 4096
    it = await started(tmp_path, {"double": double})
    try:
        await it.node.ground.registry.register(HERE)

        assert await it.call("here/double", large) == [0, large * 2]
    finally:
        await it.stop()


async def test_a_node_that_does_not_know_a_protocol_says_so_and_loses_nothing(tmp_path: Path) -> None:
    async def sleepy(code: Code) -> bytes:
        code.sleep(50)
        return b"awake"

    it = await started(tmp_path, {"sleepy": sleepy})
    try:
        here = (await it.node.ground.registry.register(HERE)).deployment
        ident = await it.send("here/sleepy")
        await eventually(lambda: (record := it.record(ident)) is not None and record.length == 2, "it sleeps")
        it.protocols = known_protocols
        await it.restart()

        endpoint = await eventually(lambda: it.node.ground.invoker.endpoints.get(here.id), "its endpoint")
        await eventually(lambda: endpoint.failures > 2, "several tries")
        assert endpoint.health("n").last_error == (
            "the deployment speaks 'in-process', and this node knows only holdfast: run the release here that it was "
            "registered with"
        )

        it.protocols = speaking({"sleepy": sleepy})
        await it.restart()
        assert await it.completed(ident) == [0, b"awake"]
    finally:
        await it.stop()


async def test_the_first_protocol_says_why_none_finds_an_endpoint(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        both = speaking({})(Means())

        with pytest.raises(EndpointFailed, match="is not in this process"):
            await both.discover("http://127.0.0.1:1")
        with pytest.raises(EndpointFailed, match="no Holdfast endpoint answers"):
            await it.node.ground.protocols.discover("http://127.0.0.1:1")
        await both.close()


async def test_another_protocol_waits_until_every_node_runs_this_release() -> None:
    first = registry()

    async def discover(uri: str) -> Offer:
        return Offer([Service("s", "service", [Handler("h", "plain")])], "sdk", ["here"], [1, 1], "in-process")

    class Nowhere:
        def propose(self, command: bytes) -> NoReturn:
            raise AssertionError("nothing is proposed that older nodes do not know")

    with pytest.raises(Unavailable, match="in-process requires that every node of the cluster runs this release"):
        await Registry(first.machine, Nowhere(), discover).register(HERE)
