"""`python -m holdfast.sdk MODULE:VARIABLE` runs the handlers of a module. `holdfast dev --app` starts it beside its
node.

The variable is a service, a list of services, or the result of `endpoint([...])`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
import traceback
from typing import Any

from holdfast.sdk import logs
from holdfast.sdk.endpoint import Endpoint
from holdfast.sdk.identity import load_identity
from holdfast.sdk.loop import calm_collector, new_event_loop
from holdfast.sdk.server import Server
from holdfast.sdk.service import Service, VirtualObject, Workflow

NOT_IMPORTED = 3


def load(target: str) -> Endpoint:
    """The endpoint that MODULE:VARIABLE names. Exits with an error message if there is none."""
    module_name, _, path = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for name in (path or "app").split("."):
            found = getattr(found, name)
        return _endpoint(found)
    except Exception as error:
        # Show the user's own lines, not ours above them.
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
        sys.stderr.write("".join(traceback.format_list(theirs)))
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.stderr.write(f"\nCannot run {target}.\n")
        sys.exit(NOT_IMPORTED)


def _endpoint(found: Any) -> Endpoint:
    inner = getattr(found, "inner", found)  # The result of `endpoint` wraps an Endpoint.
    if isinstance(inner, Endpoint):
        return inner
    if isinstance(found, Service | VirtualObject | Workflow):
        found = [found]
    if not isinstance(found, list | tuple) or not found:
        raise TypeError(f"it must be a service, a list of services or an endpoint, not {type(found).__name__}")
    return Endpoint(found)


async def run(endpoint: Endpoint, host: str, port: int, lifeline: int | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if lifeline is not None:
        # Nothing is written to the pipe: it becomes readable when the process that started this one ends.
        loop.add_reader(lifeline, stop.set)
    server = Server(endpoint)
    try:
        await server.start(host=host, port=port)
    except OSError as error:
        sys.exit(f"cannot listen at {host}:{port}: {error.strerror or error}")
    calm_collector()
    await stop.wait()
    if lifeline is not None:
        loop.remove_reader(lifeline)
    await server.stop(grace=3.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m holdfast.sdk", description="Run the handlers of a module.")
    parser.add_argument("target", metavar="MODULE:VARIABLE")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9080)
    parser.add_argument("--lifeline", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--identity-key",
        action="append",
        metavar="KEY",
        help="a public key of the cluster (`holdfast identity show`): requests that it did not sign are refused; "
        "may be repeated (default: HOLDFAST_IDENTITY_KEYS)",
    )
    given = parser.parse_args()
    try:
        logs.configure()
    except ValueError as error:
        sys.exit(f"HOLDFAST_LOG_FORMAT, HOLDFAST_LOG_LEVEL: {error}")
    endpoint = load(given.target)
    try:
        endpoint.identity = load_identity(given.identity_key) or endpoint.identity
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(endpoint, given.host, given.port, given.lifeline))


if __name__ == "__main__":
    main()
