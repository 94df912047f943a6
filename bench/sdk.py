"""The cost of the SDK per invocation and per step, without a node and without a socket.

    python -m bench.sdk [invocations]

A few lines play the node and acknowledge every step in the same turn, so the measurement covers the handler's process:
decoding, the machine of an attempt, user code, encoding. `--profile` prints where the time goes.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import sys
import time

import uvloop

from holdfast.sdk import Context, Service
from holdfast.sdk.endpoint import Endpoint, Stream
from holdfast.sdk.frames import TO_NODE, Ack, Credit, Frame, Output, Start, StepFrame, decode_batch, encode_batch
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op, Step, pack_step

IN_FLIGHT = 64


def services() -> Service:
    service = Service("bench")

    async def work() -> int:
        return 1

    @service.handler
    async def empty(ctx: Context) -> int:
        return 0

    @service.handler
    async def steps(ctx: Context, count: int) -> int:
        total = 0
        for _ in range(count):
            total += await ctx.run("work", work)
        return total

    return service


class Node:
    """Acknowledges every frame, and begins another invocation for each that completes."""

    def __init__(self, handler: str, payload: bytes, invocations: int) -> None:
        self.stream = Stream(Endpoint([services()]), self.write)
        self.handler = handler
        self.payload = payload
        self.left = invocations
        self.open = 0
        self.done = asyncio.get_running_loop().create_future()

    def start(self) -> Start:
        self.left -= 1
        self.open += 1
        step = pack_step(Step(Op.INPUT, "input", [{}], 1, 1, [0, self.payload]))
        return Start(
            InvocationId(os.urandom(16)), 1, "bench", self.handler, None, 1, 0, 7, [step], False, None, False, False
        )

    async def write(self, message: bytes) -> None:
        answers: list[Frame] = []
        acks: dict[bytes, Ack] = {}
        for frame in decode_batch(message, TO_NODE):
            if type(frame) is StepFrame:
                acks[frame.invocation] = Ack(frame.invocation, 1, frame.index + 1)
            elif type(frame) is Output:
                acks.pop(frame.invocation, None)
                self.open -= 1
                if self.left:
                    answers.append(self.start())
        answers += acks.values()
        if answers:
            self.stream.receive(encode_batch(answers))
        if not self.left and not self.open and not self.done.done():
            self.done.set_result(None)


async def measure(handler: str, payload: bytes, invocations: int) -> float:
    node = Node(handler, payload, invocations)
    node.stream.receive(encode_batch([Credit(2**40)]))
    writer = asyncio.ensure_future(node.stream.run())
    started = time.process_time()
    node.stream.receive(encode_batch([node.start() for _ in range(IN_FLIGHT)]))
    await node.done
    used = time.process_time() - started
    node.stream.close()
    writer.cancel()
    return used * 1e6 / invocations


async def main(invocations: int) -> None:
    empty = await measure("empty", b"", invocations)
    print(f"empty handler: {empty:7.1f} µs of CPU per invocation, its node's part included")
    for count in (3, 10):
        used = await measure("steps", str(count).encode(), invocations)
        print(f"{count:2d} steps:      {used:7.1f} µs per invocation, {(used - empty) / count:.1f} µs per step")


if __name__ == "__main__":
    arguments = [text for text in sys.argv[1:] if not text.startswith("-")]
    number = int(arguments[0]) if arguments else 5000
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        profile.runcall(uvloop.run, main(number))
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    else:
        uvloop.run(main(number))
