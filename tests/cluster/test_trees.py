"""Trees of calls and whole values over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.routing import trees
from holdfast.sdk.journal import Op
from holdfast.statemachine import survey
from holdfast.statemachine.records import Invocation
from tests.cluster.harness import Handled
from tests.cluster.serving import Serving, run


async def calls_below(handled: Handled) -> None:
    """Calls as many invocations of itself as the input says, each with one less, and sends one to another service."""
    depth = json.loads(handled.input)
    if depth and handled.length == 1:
        handled.step(Op.SEND, "0/send/0", ["echo", "say", None, b'"sent"', {}, 0])
        calls = [
            handled.step(Op.CALL, f"0/call/{number}", ["family", "have", None, str(depth - 1).encode(), {}])
            for number in range(depth)
        ]
        await handled.acks(handled.length)
        handled.wait_for(*calls)
    elif any(step.op == Op.CALL and not step.done for step in handled.journal):
        handled.wait_for(*(index for index, step in enumerate(handled.journal) if not step.done and step.op == Op.CALL))
    else:
        handled.output(b'"done"')


async def with_family(at: Serving) -> str:
    at.endpoint.add("family/have", calls_below)
    await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
    root = await at.send("family/have", b"2")
    await at.reaches(root, "completed")
    return root


async def tree_of(at: Serving, id_: str) -> dict[str, Any]:
    status, tree = await at.admin("GET", f"/invocations/{id_}/tree")
    assert status == 200, tree
    return dict(tree)


def test_the_tree_of_calls_is_the_same_from_every_node_of_it(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        root = await with_family(at)

        found = await tree_of(at, root)
        nodes = {node["id"]: node for node in found["nodes"]}
        leaf = next(node["id"] for node in found["nodes"] if node["service"] == "echo" and node["parent"] != root)
        for id_ in nodes:
            await at.reaches(id_, "completed")
        found = await tree_of(at, root)

        assert found["root"] == root and found["complete"]
        assert [(node["service"], node["step"]) for node in found["nodes"]] == [
            ("family", None), ("echo", 1),
            ("family", 2), ("echo", 1), ("family", 2),
            ("family", 3), ("echo", 1), ("family", 2),
        ]  # fmt: skip
        assert {node["status"] for node in found["nodes"]} == {"completed"}
        assert all(node["end"] == "succeeded" and node["completed_at"] for node in found["nodes"])
        assert await tree_of(at, leaf) == found
        assert (await at.describe(root))["children"] == 3 and (await at.describe(leaf))["children"] == 0
        assert (await at.describe(leaf))["parent"] == nodes[leaf]["parent"]

        await at.admin("POST", f"/invocations/{leaf}/purge")
        [gone] = [node for node in (await tree_of(at, root))["nodes"] if node["id"] == leaf]
        assert gone["status"] is None and gone["service"] == "echo"
        await at.admin("POST", f"/invocations/{root}/purge")
        below = await tree_of(at, nodes[leaf]["parent"])
        assert below["root"] == nodes[leaf]["parent"] and len(below["nodes"]) == 3

    run(tmp_path, scenario)


def test_an_invocation_that_sends_itself_ends_the_walk(tmp_path: Path) -> None:
    async def sends_itself(handled: Handled) -> None:
        if handled.length == 1:
            handled.step(Op.SEND, "0/send/0", ["loop", "run", None, b"1", {}, 0, "again"])
            await handled.acks(2)
        handled.output(b"1")

    async def scenario(at: Serving) -> None:
        at.endpoint.add("loop/run", sends_itself)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        _, sent = await at.call("loop/run/send", b"1", headers={"Idempotency-Key": "again"})
        id_ = sent["invocationId"]
        await at.reaches(id_, "completed")

        found = await tree_of(at, id_)
        journal = (await at.admin("GET", f"/invocations/{id_}/journal"))[1]["steps"]

        assert journal[1]["argument"]["invocation"] == id_
        assert [node["id"] for node in found["nodes"]] == [id_] and found["complete"]

    run(tmp_path, scenario)


def test_a_large_tree_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "NODES_MAX", 5)

    async def scenario(at: Serving) -> None:
        root = await with_family(at)
        last = (await at.admin("GET", "/invocations?service=family&order=newest&limit=1"))[1]["invocations"][0]["id"]

        found, from_last = await tree_of(at, root), await tree_of(at, last)

        assert len(found["nodes"]) == 5 and not found["complete"]
        assert last in {node["id"] for node in from_last["nodes"]} and from_last["root"] == root
        assert not from_last["complete"]

    run(tmp_path, scenario)


def test_journals_are_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "STEPS_LOOKED_AT_MAX", 1)

    async def scenario(at: Serving) -> None:
        root = await with_family(at)

        assert len((await tree_of(at, root))["nodes"]) == 8
        monkeypatch.setattr(trees, "COUNT_SLICES_MAX", 2)
        assert (await at.describe(root))["children"] is None

    run(tmp_path, scenario)


def test_whole_values_are_read_as_they_are(tmp_path: Path) -> None:
    large = json.dumps({"text": "x" * 3_000_000}).encode()

    async def scenario(at: Serving) -> None:
        async def value(id_: str, step: int | str, part: str = "output") -> tuple[int, str, bytes]:
            url = f"{at.node.doors.urls.admin}/invocations/{id_}/steps/{step}/value?part={part}"
            async with at.http.get(url) as response:
                return response.status, response.content_type, await response.read()

        await at.reaches(id_ := await at.send("echo/say", large), "completed")
        await at.reaches(raw := await at.send("echo/say", b"\xff\xfe"), "completed")
        await at.reaches(state := await at.send("counter/k/add"), "completed")
        await at.reaches(failing := await at.send("flaky/fail"), "backing-off")
        root = await with_family(at)

        assert await value(id_, 0, "input") == (200, "application/json", large)
        assert await value(id_, "outcome") == (200, "application/json", large)
        assert await value(raw, 0) == (200, "application/octet-stream", b"\xff\xfe")
        assert await value(state, 1, "input") == (200, "application/json", b"1")
        assert await value(root, 2, "input") == (200, "application/json", b"1")
        assert await value(root, 2) == (200, "application/json", b'"done"')
        assert await value(root, 1, "input") == (200, "application/json", b'"sent"')
        for id_, step, part in (
            (root, 9, "output"), (failing, "outcome", "output"), ("inv_" + "0" * 32, 0, "input"), (state, 1, "output"),
        ):  # fmt: skip
            assert (await value(id_, step, part))[0] == 404, (step, part)
        assert (await value(root, "x"))[0] == 400 and (await value(root, 0, "whole"))[0] == 400

    run(tmp_path, scenario)


def test_the_invocations_of_a_tree_are_listed_by_its_root(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        root = await with_family(at)
        for number in range(10):
            await at.call("echo/say", str(number).encode())
        nodes = {node["id"]: node for node in (await tree_of(at, root))["nodes"]}
        for id_ in nodes:
            await at.reaches(id_, "completed")
        inner = next(id_ for id_, node in nodes.items() if node["parent"] == root and node["service"] == "family")

        below = await at.listed("invocations", f"root={root}", 3)
        oldest = await at.listed("invocations", f"root={root}&order=oldest", 3)
        echoes = await at.listed("invocations", f"root={root}&service=echo", 3)
        called = await at.listed("invocations", f"parent={root}", 2)
        _, page = await at.admin("GET", f"/invocations?parent={root}")

        assert {each["id"] for each in below} == nodes.keys() and len(below) == len(nodes) == 8
        assert [each["id"] for each in oldest] == [each["id"] for each in reversed(below)]
        assert {each["id"] for each in echoes} == {id_ for id_, node in nodes.items() if node["service"] == "echo"}
        assert {each["id"] for each in called} == {id_ for id_, node in nodes.items() if node["parent"] == root}
        assert page["looked_at"] == 3 and page["complete"], "others were not looked at"
        assert {each["id"] for each in await at.listed("invocations", f"root={inner}", 9)} == {
            inner,
            *(id_ for id_, node in nodes.items() if node["parent"] == inner),
            *(id_ for id_, node in nodes.items() if nodes.get(node["parent"], {}).get("parent") == inner),
        }
        assert (await at.admin("POST", f"/invocations/purge?root={inner}&dry_run=true"))[1]["matched"] == 3
        await at.admin("POST", f"/invocations/{root}/purge")
        assert (await at.error("GET", f"/invocations?root={root}"))[0] == 404
        assert {each["id"] for each in await at.listed("invocations", f"parent={root}", 2)} == {
            each["id"] for each in called
        }, "its journal is gone, so all are looked at"

    run(tmp_path, scenario)


def test_a_tree_is_walked_once_for_all_of_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Invocation] = []
    walk = trees.Trees.members

    async def counted(self: trees.Trees, record: Invocation) -> trees.Members:
        walked.append(record)
        return await walk(self, record)

    monkeypatch.setattr(trees.Trees, "members", counted)

    async def scenario(at: Serving) -> None:
        root = await with_family(at)

        assert len(await at.listed("invocations", f"root={root}", 2)) == 8
        assert len(walked) == 1
        assert len(await at.listed("invocations", f"root={root}", 9)) == 8
        assert len(walked) == 2, "a first page shows what there is now"

    run(tmp_path, scenario)


def test_a_tree_that_is_too_large_to_walk_is_not_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MEMBERS_MAX", 4)

    async def scenario(at: Serving) -> None:
        root = await with_family(at)

        _, page = await at.admin("GET", f"/invocations?root={root}")
        done = await at.admin("POST", f"/invocations/purge?root={root}&dry_run=true")

        assert len(page["invocations"]) == page["looked_at"] == 4 and not page["complete"]
        assert done[1]["matched"] == 4 and done[1]["more"]

    run(tmp_path, scenario)


async def shares(handled: Handled) -> None:
    """Calls by an idempotency key: only the first caller begins the invocation."""
    if handled.length == 1:
        handled.wait_for(handled.step(Op.CALL, "0/call/0", ["echo", "say", None, b"1", {}, "shared"]))
    else:
        handled.output(b"1")


def test_a_call_that_another_invocation_began_is_in_its_tree_alone(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        at.endpoint.add("family/share", shares)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        first = await at.send("family/share")
        await at.reaches(first, "completed")
        second = await at.send("family/share")
        await at.reaches(second, "completed")

        async def ids(query: str) -> list[str]:
            return [each["id"] for each in await at.listed("invocations", query, 5)]

        [shared] = await ids(f"parent={first}")
        assert sorted(await ids(f"root={first}")) == sorted([first, shared])
        assert await ids(f"root={second}") == [second] and await ids(f"parent={second}") == []

    run(tmp_path, scenario)


def test_calls_of_a_workflow_from_before_its_restart_are_found(tmp_path: Path) -> None:
    started: list[Handled] = []

    async def calls_when_it_starts_first(handled: Handled) -> None:
        started.append(handled)
        if len(started) == 1:
            handled.wait_for(handled.step(Op.CALL, "0/call/0", ["echo", "say", None, b"1", {}]))
        else:
            handled.output(b"1")

    async def scenario(at: Serving) -> None:
        at.endpoint.add("flow:workflow/run:main", calls_when_it_starts_first)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        parent = await at.send("flow/k/run")
        await at.reaches(parent, "completed")
        [before] = await at.listed("invocations", f"parent={parent}", 5)
        assert (await at.admin("POST", f"/invocations/{parent}/restart?step=0"))[0] == 200
        await at.reaches(parent, "completed")

        assert (await at.describe(parent))["children"] == 0
        assert [each["id"] for each in await at.listed("invocations", f"parent={parent}", 5)] == [before["id"]]

    run(tmp_path, scenario)
