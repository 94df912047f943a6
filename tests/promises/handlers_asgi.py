"""The handlers of the promises' tests behind an ASGI server."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import hypercorn.asyncio
import hypercorn.config
import uvicorn

from holdfast.sdk import endpoint
from tests.promises.handlers import ORACLE, SERVICES, VERSION

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=("uvicorn", "hypercorn"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--version", default="1")
    parser.add_argument("--websockets", default="auto", choices=("auto", "websockets", "websockets-sansio", "wsproto"))
    options = parser.parse_args()
    ORACLE.append(options.oracle)
    VERSION[0] = options.version
    if options.server == "uvicorn":
        uvicorn.run(endpoint(SERVICES), port=options.port, log_level="warning", ws=options.websockets)
    else:
        config = hypercorn.config.Config()
        config.bind = [f"127.0.0.1:{options.port}"]
        asyncio.run(hypercorn.asyncio.serve(endpoint(SERVICES), config))  # type: ignore[arg-type]
