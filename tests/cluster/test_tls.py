"""Nodes that prove themselves by certificates, made as docs/cluster.md says."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.config import Config, build
from holdfast.cluster.node import Node
from tests.cluster.harness import FAST, PATIENCE_S, FakeEndpoint, eventually
from tests.cluster.load import COUNTER, Load
from tests.cluster.test_founding import NAMES, give_up, stop, waits_for
from tests.ports import free_ports

DOCUMENT = Path(__file__).parents[2] / "docs" / "cluster.md"


def make_certificates(folder: Path) -> Path:
    """With the commands from the documentation."""
    block = re.search(r"```sh\n([^`]*holdfast cert ca.*?)```", DOCUMENT.read_text(), re.S)
    assert block is not None, "docs/cluster.md says how to make certificates"
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", "-ec", block[1]]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, "PATH": path})
    return folder / "certs"


def nodes(path: Path, certificates: dict[str, Path], **settings: Any) -> dict[str, Node]:
    places = dict(zip(NAMES, free_ports(3), strict=True))

    def config(name: str) -> Config:
        files = certificates[name]
        return build(
            {
                "node": name, "data": str(path / name), "partitions": 2, "ingress": 0, "admin": 0, "peer": places[name],
                "peers": {other: f"127.0.0.1:{port}" for other, port in places.items()},
                "tls_cert": str(files / f"{name}.pem"), "tls_key": str(files / f"{name}.key"),
                "tls_ca": str(files / "ca.pem"), **settings,
            }
        )  # fmt: skip

    return {name: Node(config(name), timing=FAST) for name in NAMES}


async def test_three_nodes_with_certificates_form_a_cluster_and_serve(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    cluster = nodes(tmp_path, dict.fromkeys(NAMES, files))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(node.start() for node in cluster.values()))
    endpoint = FakeEndpoint(COUNTER)
    await endpoint.start()
    await cluster["n1"].ground.registry.register(endpoint.uri)
    await eventually(lambda: all(node.ground.registry.state.deployments for node in cluster.values()))

    async with Load(lambda: [node.doors.urls.ingress for node in cluster.values()]) as load:
        await load.more(30)

    assert load.errors == []
    assert all(link.connected for link in cluster["n2"].ground.log.links().values())
    await stop(*cluster.values())
    await endpoint.stop()


async def test_a_node_with_a_foreign_certificate_is_refused_and_both_sides_report_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    cluster = nodes(tmp_path, {"n1": ours, "n2": ours, "n3": theirs})
    starting = [asyncio.ensure_future(node.start()) for node in cluster.values()]

    await eventually(lambda: "no link to n3: TLS failed" in waits_for(cluster["n1"]), "n1 says why")
    await eventually(lambda: "n2" not in waits_for(cluster["n1"]), "n1 and n2 accept each other")
    for other in ("n1", "n2"):
        await eventually(lambda other=other: f"no link to {other}: TLS failed" in waits_for(cluster["n3"]), "n3 too")  # type: ignore[misc]
    assert "does it use TLS and trust the CA of our certificate?" in caplog.text
    assert not any(task.done() for task in starting)
    assert all(node.ground.meta.state.partitions == 0 for node in cluster.values()), "nothing was formed"
    for task in starting:
        await give_up(task)


async def test_a_node_with_the_certificate_of_another_is_refused(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    stolen = tmp_path / "stolen"
    shutil.copytree(files, stolen)
    for suffix in ("pem", "key"):
        shutil.copy(files / f"n1.{suffix}", stolen / f"n3.{suffix}")
    cluster = nodes(tmp_path, {"n1": files, "n2": files, "n3": stolen})
    starting = [asyncio.ensure_future(node.start()) for node in cluster.values()]

    await eventually(lambda: "does not name 'n3'" in waits_for(cluster["n2"]), "n2 says why")
    for task in starting:
        await give_up(task)
