"""A node in this process, and a handler endpoint that sends raw frames, so that a test can send anything that a handler
might.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from holdfast.cluster.clock import Clock
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.environment import Environment
from holdfast.cluster.handlers.dispatch import Timing
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.table import Protocols, known_protocols
from holdfast.cluster.leading.leadership import Leadership
from holdfast.cluster.node import Node
from holdfast.cluster.partition.door import Partition
from holdfast.sdk.frames import (
    HIGHEST_HEADER,
    TO_SDK,
    VERSION,
    VERSION_HEADER,
    Abort,
    Ack,
    Completion,
    Credit,
    Error,
    Frame,
    Goaway,
    Output,
    Start,
    StepFrame,
    Waiting,
    decode_batch,
    encode_batch,
)
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import Invoke, Mode
from holdfast.statemachine.effects import Status
from holdfast.statemachine.records import Invocation

PATIENCE_S = 60.0
FAST = Timing(connect_s=5.0, backoff_s=0.01, backoff_max_s=0.1, sweep_s=0.05)

MODES = {"plain": Mode.PLAIN, "exclusive": Mode.EXCLUSIVE, "shared": Mode.SHARED, "main": Mode.WORKFLOW}


async def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := condition()):
                await asyncio.sleep(0.005)
            return found
    except TimeoutError:
        raise AssertionError(f"{what} did not come true in {PATIENCE_S} s") from None


class Handled:
    """One attempt as the endpoint sees it: frames in, frames out."""

    def __init__(self, start: Start, send: Callable[[Frame], None]) -> None:
        self.start = start
        self.id, self.epoch = start.invocation, start.epoch
        self.journal = [unpack_step(raw) for raw in start.journal]
        self.length = len(start.journal)
        self.acked = self.length
        self.aborted = False
        self.inbox: asyncio.Queue[Frame] = asyncio.Queue()
        self._send = send

    @property
    def input(self) -> bytes:
        outcome = self.journal[0].outcome
        assert outcome is not None
        payload: bytes = outcome[1]
        return payload

    def send(self, frame: Frame) -> None:
        self._send(frame)

    def step(self, op: int, key: str, argument: list[Any], outcome: list[Any] | None = None) -> int:
        index = self.length
        self.length += 1
        self.send(StepFrame(self.id, self.epoch, index, op, key, argument, outcome))
        return index

    def run(self, name: str, result: bytes) -> int:
        return self.step(Op.RUN, f"0/{name}/{self.length}", [name], [0, result])

    def output(self, payload: bytes) -> None:
        self.send(Output(self.id, self.epoch, [0, payload]))

    def wait_for(self, *steps: int) -> None:
        self.send(Waiting(self.id, self.epoch, list(steps)))

    def fail(self, message: str = "no", *, retry_after_ms: int = 0, pause: bool = False) -> None:
        self.send(Error(self.id, self.epoch, [1, 500, message, "Oops"], retry_after_ms, pause))

    async def acks(self, length: int) -> None:
        while self.acked < length:
            await self.receive()

    async def completion(self, index: int) -> list[Any]:
        while True:
            frame = await self.receive()
            if type(frame) is Completion and frame.index == index:
                return frame.outcome

    async def receive(self) -> Frame:
        async with asyncio.timeout(PATIENCE_S):
            frame = await self.inbox.get()
        if type(frame) is Ack:
            self.acked = frame.length
        if type(frame) is Abort:
            self.aborted = True
        return frame


Script = Callable[[Handled], Awaitable[None]]


class FakeEndpoint:
    """Registered handlers are coroutines over raw frames. `service` is 'name' or 'name:kind'.

    `highest`: the highest version of the protocol that it supports. With 1 it behaves like SDKs of version 1.
    """

    def __init__(
        self,
        handlers: dict[str, Script],
        *,
        modes: tuple[str, ...] = ("stream", "request-response"),
        highest: int = VERSION,
        message_bytes_max: int = 1 << 30,
    ) -> None:
        self.highest = highest
        self.message_bytes_max = message_bytes_max
        self.versions: list[int] = []  # Of each stream and request, in order of arrival.
        self.handlers: dict[tuple[str, str], Script] = {}
        self.services: dict[str, dict[str, Any]] = {}
        self.modes = modes
        self.options: dict[str, Any] = {}
        self.starts: list[Start] = []
        self.attempts: dict[InvocationId, Handled] = {}
        self.sockets: list[web.WebSocketResponse] = []
        self.stream_status = 101
        self.headers: dict[str, str] = {}
        self.invoke_status: list[int] = []
        self.credit = 100_000
        self.raw: list[bytes] = []
        self.requests = 0
        self.port = 0
        for path, script in handlers.items():
            self.add(path, script)

    def add(self, path: str, script: Script) -> None:
        """`greeter/hello`, `counter:object/add:exclusive`, `flow:workflow/run:main`"""
        place, _, name = path.partition("/")
        service, _, kind = place.partition(":")
        handler, _, mode = name.partition(":")
        entry = self.services.setdefault(service, {"name": service, "kind": kind or "service", "handlers": []})
        entry["handlers"].append({"name": handler, "mode": mode or "plain"})
        self.handlers[service, handler] = script

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/discover", self._discover)
        app.router.add_get("/stream", self._stream)
        app.router.add_post("/invoke/{service}/{handler}", self._invoke)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        for socket in self.sockets:
            with suppress(Exception):
                await asyncio.wait_for(socket.close(), 0.2)
        await self._runner.cleanup()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection, without a close frame."""
        for socket in self.sockets:
            transport = socket._req.transport if socket._req is not None else None
            if transport is not None:
                transport.abort()

    async def say(self, raw: bytes) -> None:
        """Send arbitrary bytes on the newest stream."""
        await self.sockets[-1].send_bytes(raw)

    async def _discover(self, request: web.Request) -> web.Response:
        services = [{**service, "options": self.options.get(service["name"], {})} for service in self.services.values()]
        return web.json_response(
            {
                "protocol": {"min": 1, "max": self.highest},
                "sdk": "tests/1",
                "modes": list(self.modes),
                "services": services,
            }
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.stream_status != 101:
            return web.Response(status=self.stream_status, headers=self.headers)
        version = self._version(request, HIGHEST_HEADER)
        if version is None:
            return web.Response(status=400, text="this endpoint does not speak that version of the protocol")
        socket = web.WebSocketResponse(compress=False, max_msg_size=self.message_bytes_max)
        if self.highest > 1:
            socket.headers[VERSION_HEADER] = str(version)
        await socket.prepare(request)
        self.sockets.append(socket)
        out: asyncio.Queue[Frame] = asyncio.Queue()
        out.put_nowait(Credit(self.credit))
        tasks = [asyncio.create_task(self._write(socket, out, version))]
        live: dict[tuple[InvocationId, int], Handled] = {}
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self.raw.append(message.data)
                for frame in decode_batch(message.data, TO_SDK, version):
                    if type(frame) is Credit:
                        continue
                    out.put_nowait(Credit(1))
                    if type(frame) is Start:
                        self.starts.append(frame)
                        handled = Handled(frame, out.put_nowait)
                        live[frame.invocation, frame.epoch] = self.attempts[frame.invocation] = handled
                        script = self.handlers[frame.service, frame.handler]
                        tasks.append(asyncio.create_task(self._handle(script, handled)))
                    else:
                        assert not isinstance(frame, Goaway)
                        found = live.get((frame.invocation, frame.epoch))  # type: ignore[union-attr]
                        if found is not None:
                            found.inbox.put_nowait(frame)
        finally:
            for task in tasks:
                task.cancel()
        return socket

    def _version(self, request: web.Request, header: str) -> int | None:
        """The version of a stream or a request: the highest common one; None if there is none."""
        written = int(request.headers.get(VERSION_HEADER, "1"))
        wanted = min(int(request.headers.get(header, written)), self.highest) if self.highest > 1 else written
        if wanted > self.highest:
            return None
        self.versions.append(wanted)
        return wanted

    async def _handle(self, script: Script, handled: Handled) -> None:
        await script(handled)

    async def _write(self, socket: web.WebSocketResponse, out: asyncio.Queue[Frame], version: int) -> None:
        with suppress(ConnectionError, RuntimeError):
            while True:
                frames = [await out.get()]
                while not out.empty():
                    frames.append(out.get_nowait())
                await socket.send_bytes(encode_batch(frames, version))

    async def _invoke(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.invoke_status:
            return web.Response(status=self.invoke_status.pop(0), headers=self.headers, text="told to")
        version = self._version(request, VERSION_HEADER)
        if version is None:
            return web.Response(status=400, text="this endpoint does not speak that version of the protocol")
        (start,) = decode_batch(await request.read(), TO_SDK, version)
        assert type(start) is Start and not start.more
        self.starts.append(start)
        frames: list[Frame] = []
        handled = Handled(start, frames.append)
        await self.handlers[request.match_info["service"], request.match_info["handler"]](handled)
        headers = {HIGHEST_HEADER: str(self.highest)} if self.highest > 1 else {}
        body = encode_batch(frames, version)
        return web.Response(body=body, content_type="application/vnd.holdfast+msgpack", headers=headers)


def leads(partition: Partition) -> bool:
    return isinstance(partition.leadership, Leadership) and partition.leadership.announced


class World:
    """A node with its directory, and endpoints."""

    def __init__(self, path: Path, *, partitions: int = 2, **settings: Any) -> None:
        self.path = path
        self.failures: list[BaseException] = []
        self.endpoints: list[FakeEndpoint] = []
        self.boot = "boot 1"
        self.timing = FAST
        self.protocols: Callable[[Means], Protocols] = known_protocols
        self.clock: Clock | None = None
        self._settings = {"partitions": partitions, **settings}
        self.node: Node

    async def start(self) -> Node:
        free = HostPort("127.0.0.1", 0)
        config = Config(data=self.path / "node", ingress=free, admin=free, peer=free, **self._settings)
        environment = Environment(clock=self.clock, boot=self.boot)
        self.node = Node(
            config, environment, timing=self.timing, protocols=self.protocols, on_fatal=self.failures.append
        )
        await self.node.start()
        await eventually(lambda: all(leads(partition) for partition in self.node.partitions), "leading")
        return self.node

    async def kill(self) -> None:
        """End like a process killed by SIGKILL: no handover, no clean close."""
        node = self.node
        serving, doors = node.serving, node.doors
        serving.stop_beginning()
        node.ground.invoker.stopping = True
        for partition in node.partitions:
            if partition.leadership is not None:
                partition.leadership.end()
        await doors.ingress.stop()
        await doors.admin.stop()
        if doors.token_use is not None:
            await doors.token_use.stop()
        await serving.identity.stop()
        node.settle_no_more()
        await serving.courier.close()
        await serving.controller.stop()
        await node.ground.releases.stop()
        await node.watchdog.stop()
        await node.serving.handover.stop()
        await node.ground.leftovers.stop()
        await node.ground.invoker.close()
        await node.ground.protocols.close()
        await node.serving.backups.stop()
        await node.ground.objects.stop()
        await node.ground.snapshots.stop()
        await node.ground.log.stop(handover_s=0.0)
        for machine in node.ground.replicas.machines.values():
            machine.state._env.close()

    async def restart(self) -> Node:
        await self.kill()
        return await self.start()

    async def register(self, handlers: dict[str, Script], **kwargs: Any) -> FakeEndpoint:
        endpoint = FakeEndpoint(handlers, **kwargs)
        await endpoint.start()
        self.endpoints.append(endpoint)
        await self.node.ground.registry.register(endpoint.uri, force=True)
        return endpoint

    async def stop(self) -> None:
        await self.node.stop()
        for endpoint in self.endpoints:
            await endpoint.stop()
        assert not self.failures, self.failures

    # -- invocations

    def invoke(
        self, path: str, payload: bytes = b"", *, key: str | None = None, ident: InvocationId | None = None
    ) -> Invoke:
        service, _, handler = path.partition("/")
        target = self.node.ground.registry.resolve(service, handler)
        return Invoke(
            ident or self.node.serving.router.mint(service, key),
            service,
            handler,
            key,
            target.mode,
            payload,
            {},
            0,
            None,
            -1,
            target.options.retention_ms,
        )

    async def call(
        self, path: str, payload: bytes = b"", *, key: str | None = None, ident: InvocationId | None = None
    ) -> Any:
        """The outcome, as a client gets it."""
        command = self.invoke(path, payload, key=key, ident=ident)
        return await self.outcome_of(command)

    async def outcome_of(self, command: Invoke) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            with self.node.ground.replies.wait(command.id) as reply:
                result = await self.node.serving.router.submit(command.id, command)
                outcome = result.outcome if result.outcome is not None else await reply
            ref = refs.in_outcome(outcome)
            return outcome if ref is None else [0, await self.node.serving.reader.value(command.id, ref)]

    async def send(self, path: str, payload: bytes = b"", *, key: str | None = None) -> InvocationId:
        command = self.invoke(path, payload, key=key)
        result = await self.node.serving.router.submit(command.id, command)
        assert result.code == 0, result
        return command.id

    def record(self, ident: InvocationId) -> Invocation | None:
        with self.node.serving.router.partition(ident).state.read() as txn:
            return queries.load(txn, ident)

    def outcome(self, ident: InvocationId) -> Any:
        with self.node.serving.router.partition(ident).state.read() as txn:
            return queries.outcome(txn, ident)

    async def reaches(self, ident: InvocationId, status: int) -> Invocation:
        def there() -> Invocation | None:
            record = self.record(ident)
            return record if record is not None and record.status == status else None

        found: Invocation = await eventually(there, f"status {status}")
        return found

    async def completed(self, ident: InvocationId) -> Any:
        await self.reaches(ident, Status.COMPLETED)
        return self.outcome(ident)


@asynccontextmanager
async def world(path: Path, **settings: Any) -> AsyncIterator[World]:
    made = World(path, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def echo(handled: Handled) -> None:
    handled.output(handled.input)


async def three_steps(handled: Handled) -> None:
    for name in ("a", "b", "c")[handled.length - 1 :]:
        index = handled.run(name, name.encode())
        await handled.acks(index + 1)
    handled.output(b"done")


def entropy() -> bytes:
    return os.urandom(16)
