"""One node of the replicated log under test: registers and append-only sets, over a Unix socket.

    python -m holdfast.chaos.log_node --name n1 --listen 127.0.0.1:7000 --data DIR --socket PATH --peers JSON ...

The state is in memory and is rebuilt from the log on every start, so a lost entry shows at once. Clients send lines of
JSON over a socket in the file system, which network faults do not affect, so every answer comes from the node itself.
The node ends when its standard input does, so nothing outlives the run that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from holdfast.log.engine import Snapshot
from holdfast.log.environment import NodeConfig
from holdfast.log.errors import ProposalError
from holdfast.log.messages import GroupId
from holdfast.log.node import Group, LogNode
from holdfast.log.replica import Committed
from holdfast.log.rows import Rows
from holdfast.log.sockets import Address
from holdfast.sdk.loop import new_event_loop

SECRET_VARIABLE = "HOLDFAST_CHAOS_SECRET"
FORGET_EVERY = 40  # The planted fault drops one of this many writes.
#: There are few groups here: every commit makes a row, and rows come and go.
ROWS = Rows(groups_min=1, recent_bytes=64 * 1024, filed_every=8, kept_bytes=256 * 1024, sparse=2)


class KeyValues:
    """What a group replicates. Every command gets its result where it was proposed; the digest covers all of them."""

    def __init__(self) -> None:
        self.applied = (0, 0)
        self.digest = b""
        self.registers: dict[str, Any] = {}
        self.sets: dict[str, list[Any]] = {}
        self.results: dict[bytes, object] = {}  # Of commands proposed here: the asker puts its token, apply the result.

    def apply(self, entries: Sequence[Committed]) -> None:
        for entry in entries:
            for command in entry.commands:
                self.digest = hashlib.blake2b(self.digest + command, digest_size=16).digest()
                token, kind, key, argument = msgpack.unpackb(command)
                result = self._do(kind, key, argument)
                if token in self.results:
                    self.results[token] = result
        self.applied = (entries[-1].index, entries[-1].term)

    def _do(self, kind: str, key: str, argument: Any) -> object:
        match kind:
            case "write":
                self.registers[key] = argument
                return None
            case "cas":
                expected, new = argument
                if self.registers.get(key) != expected:
                    return False
                self.registers[key] = new
                return True
            case "add":
                self.sets.setdefault(key, []).append(argument)
                return None
            case _:
                raise ValueError(f"no such command: {kind!r}")

    def read(self, kind: str, key: str) -> object:
        return self.registers.get(key) if kind == "read" else list(self.sets.get(key, ()))

    def snapshot(self) -> Snapshot | None:
        return None  # The log is never trimmed here: a new member reads it from the beginning.


class Server:
    """Serves the requests of clients and of the run."""

    def __init__(self, *, forgetful: bool) -> None:
        self.machines: dict[GroupId, KeyValues] = {}
        self.node: LogNode | None = None
        self._forgetful = forgetful
        self._writes = 0

    def open_machine(self, group: GroupId) -> KeyValues:
        machine = self.machines[group] = KeyValues()
        return machine

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(json.loads(line))).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass  # The client gave up; its operation stays open in the history.
        finally:
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, object]:
        try:
            return {"result": await self._do(**request)}
        except ProposalError as error:
            return {
                "error": type(error).__name__,
                "definite": error.definite,
                "leader": getattr(error, "leader", None),
                "message": str(error),
            }

    async def _do(self, do: str, group: int = 0, **arguments: Any) -> object:
        assert self.node is not None
        match do:
            case "status":
                return self._status()
            case "transfer":
                return self.node.group(group).transfer(**arguments)
            case "change":
                return await self.node.group(group).change_members(tuple(arguments["members"]), arguments["timeout_s"])
            case "read" | "read-all":
                await self.node.group(group).read_index()
                return self.machines[GroupId(group)].read(do, **arguments)
            case _:
                return await self._propose(self.node.group(group), do, **arguments)

    async def _propose(self, group: Group, kind: str, *, key: str, argument: Any) -> object:
        self._writes += 1
        if self._forgetful and self._writes % FORGET_EVERY == 0 and kind != "cas" and group.is_leader:
            return None  # The planted fault: acknowledged, and never proposed.
        machine, token = self.machines[group.id], os.urandom(12)
        machine.results[token] = None
        try:
            await group.propose(msgpack.packb([token, kind, key, argument]))
            return machine.results[token]
        finally:
            del machine.results[token]

    def _status(self) -> list[dict[str, object]]:
        assert self.node is not None
        return [
            {
                **self.node.group(group).status()._asdict(),
                "machine_applied": self.machines[group].applied[0],
                "digest": self.machines[group].digest.hex(),
            }
            for group in self.node.host.replicas
        ]


async def run(options: argparse.Namespace, secret: bytes) -> None:
    host, port = options.listen.rsplit(":", 1)
    server = Server(forgetful=options.forgetful)
    server.node = LogNode(
        NodeConfig(
            node=options.name,
            cluster="chaos",
            data=options.data,
            listen=Address(host, int(port)),
            peers={name: Address(*where) for name, where in json.loads(options.peers).items()},
            secret=secret,
            rows=ROWS,
        ),
        open_machine=server.open_machine,
    )
    await server.node.start()
    if options.name in options.members:
        for group in range(1, options.groups + 1):
            server.node.create_group(group, tuple(options.members))
    options.socket.unlink(missing_ok=True)
    listening = await asyncio.start_unix_server(server.serve, options.socket)
    assert listening.is_serving()  # Also keeps a reference: the event loop drops a server without one.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    os._exit(0)  # Like a kill: there is no node left to hand over to.


def main() -> None:
    parser = argparse.ArgumentParser(description="One node of a chaos run; `python -m holdfast.chaos.log` starts them.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--peers", required=True, help="JSON: name -> [host, port]")
    parser.add_argument("--members", required=True, type=lambda text: text.split(","), help="the groups' first members")
    parser.add_argument("--groups", required=True, type=int)
    parser.add_argument(
        "--forgetful", action="store_true", help="a planted fault: acknowledge some writes and drop them"
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(options, bytes.fromhex(os.environ.pop(SECRET_VARIABLE))))


if __name__ == "__main__":
    main()
