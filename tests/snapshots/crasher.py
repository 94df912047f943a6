"""A program that is killed in the middle: it does one thing, and sends itself SIGKILL before its n-th step.

    python -m tests.snapshots.crasher n cut|put|restore|fetch|s3-put arguments...

A step is a call that writes, syncs or renames, or a request to S3. They are counted from outside the code under test,
by wrapping the functions that it calls. Exits with 0 if there were fewer than n steps; prints the name of the step it
dies at.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.httpsession import URLLib3Session

from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.opening import open_store
from holdfast.snapshots.restore import restore_blocking
from holdfast.snapshots.transfer import fetch_blocking
from tests.snapshots.states import State

_STEPS = ("write", "pwrite", "fsync", "fdatasync", "rename", "ftruncate", "mkdir")


def die_at(number: int) -> None:
    done = 0

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                sys.stdout.write(name)
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in _STEPS:
        setattr(os, name, counted(name, getattr(os, name)))
    URLLib3Session.send = counted("send", URLLib3Session.send)


def main(number: int, action: str, first: Path, second: str, third: str = "") -> None:
    state = State(first) if action == "cut" else None  # Before steps are counted, because it is not under test.
    store = open_store(third) if third else None
    die_at(number)
    match action:
        case "cut":
            assert state is not None
            cut_blocking(state.env, state.describe, Path(second))
        case "put":
            assert isinstance(store, DirectoryStore)
            store.put(first, second)
        case "restore":
            restore_blocking(first, Path(second))
        case "s3-put":
            assert store is not None
            store.put(first, second)
        case "fetch":
            assert store is not None
            fetch_blocking(store, second, first)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
