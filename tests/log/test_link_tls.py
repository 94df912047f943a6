"""Links over TLS."""

from __future__ import annotations

import asyncio
import random
import ssl
from pathlib import Path

import pytest

from holdfast.log.sockets import TlsFiles, tls_contexts
from tests.log.links import SECRET, Node, Run, certificates, connected, eventually, started


@pytest.mark.parametrize("secret", [None, SECRET], ids=["tls", "tls-and-secret"])
@pytest.mark.parametrize("common", [False, True], ids=["dns-name", "common-name"])
def test_nodes_with_certificates_of_one_ca_talk(run: Run, tmp_path: Path, secret: bytes | None, common: bool) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b", common=common)
        a, b = Node("a", secret=secret, tls=files["a"]), Node("b", secret=secret, tls=files["b"])
        big = random.Random(2).randbytes(3_000_000)
        async with connected(a, b):
            a.send("b", b"small")
            a.send("b", big)
            b.send("a", b"answer")
            await b.until(lambda: b.frames == [b"small", big])
            await a.until(lambda: a.frames == [b"answer"])

    run(scenario())


def test_a_certificate_of_another_ca_is_refused_by_both_sides(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        ours, theirs = certificates(tmp_path, "a", "b"), certificates(tmp_path, "a", "b")
        trusting = TlsFiles(cert=theirs["a"].cert, key=theirs["a"].key, ca=ours["a"].ca)
        for files in (theirs["a"], trusting):
            a, b = Node("a", secret=None, tls=files), Node("b", secret=None, tls=ours["b"])
            async with started(a, b):
                await eventually(lambda a=a: "TLS" in a.error("b") or "certificate" in a.error("b"))  # type: ignore[misc]
                assert a.events == b.events == []

    run(scenario())


def test_a_certificate_that_names_another_node_is_refused(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b", "z")
        a, b = Node("a", secret=None, tls=files["z"]), Node("b", secret=None, tls=files["b"])
        async with started(a, b):
            await eventually(lambda: "does not name 'a'" in a.error("b").replace("\\", ""))
            assert a.events == b.events == []
        a, b = Node("a", secret=None, tls=files["a"]), Node("b", secret=None, tls=files["z"])
        async with started(a, b):
            await eventually(lambda: "does not name 'b'" in a.error("b"))
            assert a.events == b.events == []

    run(scenario())


def test_the_secret_is_required_inside_tls_too(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b")
        a, b = Node("a", secret=b"u" * 16, tls=files["a"]), Node("b", tls=files["b"])
        async with started(a, b):
            await eventually(lambda: "secret" in a.error("b"))
            assert a.events == b.events == []

    run(scenario())


@pytest.mark.parametrize("dialer_has_tls", [False, True])
def test_tls_and_plain_refuse_each_other(run: Run, tmp_path: Path, dialer_has_tls: bool) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b")
        a = Node("a", tls=files["a"] if dialer_has_tls else None)
        b = Node("b", tls=None if dialer_has_tls else files["b"])
        async with started(a, b):
            await eventually(lambda: a.error("b") != "")
            assert a.events == b.events == []
            assert "TLS" in a.error("b"), a.error("b")

    run(scenario())


def test_an_older_tls_version_is_refused(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b")
        b = Node("b", secret=None, tls=files["b"])
        async with started(b):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.load_cert_chain(files["a"].cert, files["a"].key)
            context.load_verify_locations(files["a"].ca)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", b.links.port, ssl=context, server_hostname="")

    run(scenario())


def test_new_certificates_are_used_by_new_sessions_and_end_none(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = certificates(tmp_path, "a", "b"), certificates(tmp_path, "a", "b")
        a, b = Node("a", secret=None, tls=old["a"]), Node("b", secret=None, tls=old["b"])
        async with connected(a, b):
            b.links.use_tls(*tls_contexts(new["b"]))
            a.send("b", b"still here")
            await b.until(lambda: b.frames == [b"still here"])

            a.links.set_peers({})
            await a.until(lambda: not a.live)
            a.links.set_peers({"b": b.address})
            await eventually(lambda: "TLS" in a.error("b"))
            a.links.use_tls(*tls_contexts(new["a"]))
            await a.until(lambda: "b" in a.live)

    run(scenario())
