"""The audit trail: who changed what, when, from where, and with which outcome, on every node."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.http import audit
from holdfast.cluster.http.access import ANYBODY, STRANGER, Principal
from holdfast.cluster.http.audit import Audit, plain
from holdfast.log.errors import NotLeader
from holdfast.sdk.ids import InvocationId, format_awakeable, format_id
from holdfast.statemachine.access import ADMIN, READ
from holdfast.statemachine.audit import RecordActs, Trail
from tests.cluster.harness import eventually
from tests.cluster.serving import serving
from tests.cluster.test_tokens import Doors, locked, one, place

ADA = Principal("t1", "ada", (ADMIN,))


class Group:
    """A meta group that can be without a leader."""

    def __init__(self) -> None:
        self.trail = Trail()
        self.down = False
        self.tried = 0

    async def propose(self, command: RecordActs) -> None:
        self.tried += 1
        if self.down:
            raise NotLeader(None)
        self.trail.record(command)

    @property
    def actions(self) -> list[str]:
        return [each.action for each in self.trail.acts]


@asynccontextmanager
async def auditing(group: Group, *, is_open: bool = True) -> AsyncIterator[Audit]:
    made = Audit("n1", now_ms=lambda: 1000, propose=group.propose, is_open=lambda: is_open)
    made.start()
    yield made
    await made.stop()


def note(made: Audit, action: str = "kill", *, principal: Principal = ADA, door: str = "admin", **more: Any) -> None:
    given: dict[str, Any] = {"address": "10.0.0.1", "method": "POST", "targets": {}, "status": 200, "error": "", **more}
    made.note(principal, door=door, action=action, **given)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "holdfast.audit"
            and record.levelno == logging.INFO]  # fmt: skip


async def acts(doors: Doors, query: str = "") -> list[dict[str, Any]]:
    status, answer = await doors.ask("GET", f"/audit{query}", doors.root)
    assert status == 200 and answer["complete"], answer
    found: list[dict[str, Any]] = answer["acts"]
    return found


# -- the records of one node


async def test_an_act_is_a_line_in_the_log_and_an_entry_in_the_trail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    async with auditing(group) as made:
        note(made, targets={"id": "inv_1"})
        await made.settle(5)

    [act] = group.trail.acts
    [line] = lines(caplog)
    assert (act.principal, act.name, act.address, act.at_ms, act.node) == ("t1", "ada", "10.0.0.1", 1000, "n1")
    assert (act.action, act.targets, act.status) == ("kill", {"id": "inv_1"}, 200)
    assert line == {"outcome": "done", **{name: value for name, value in act._asdict().items() if name != "unrecorded"}}


async def test_names_with_control_characters_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    evil = 'x\n{"forged": 1}\r\x1b[2J\u2028\u202e\udc80'
    async with auditing(group) as made:
        note(made, principal=Principal("t\n1", evil, (ADMIN,)), targets={"key": evil, "long": "y" * 5000}, address=evil)
        await made.settle(5)

    [line] = lines(caplog)
    [act] = group.trail.acts
    for text in (line["name"], line["address"], line["targets"]["key"], act.name, *act.targets.values()):
        assert text.isprintable() and len(text) < 210
    assert all(record.getMessage().isascii() and record.getMessage().isprintable() for record in caplog.records)


async def test_a_token_in_the_wrong_place_is_not_recorded() -> None:
    assert plain("hf_abcdefghijkl_" + "s" * 43) == "hf_abcdefghijkl_…"
    assert plain("key of hf_node_" + "s" * 43 + ".") == "key of hf_node_….", "also in the midst of something"


async def test_without_a_quorum_acts_wait_but_requests_do_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(audit, "AGAIN_S", 0.01)
    group = Group()
    group.down = True
    async with auditing(group) as made:
        note(made, "drain")
        note(made, "undrain")
        await eventually(lambda: group.tried > 2)
        assert [line["action"] for line in lines(caplog)] == ["drain", "undrain"], (
            "the log of the node has them at once"
        )
        assert not group.actions

        group.down = False
        await made.settle(5)

    assert group.actions == ["drain", "undrain"]


async def test_acts_that_wait_for_a_quorum_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "AGAIN_S", 0.01)
    monkeypatch.setattr(audit, "PENDING_MAX", 10)
    group = Group()
    group.down = True
    async with auditing(group) as made:
        note(made, "first")
        await eventually(lambda: group.tried)
        for number in range(14):
            note(made, f"a{number}")
        group.down = False
        await made.settle(5)

    assert group.actions == ["first", *(f"a{number}" for number in range(4, 14))]
    assert [act.unrecorded for act in group.trail.acts][:2] == [0, 4] and made.unrecorded == 4


async def test_waiting_acts_are_recorded_when_the_node_stops() -> None:
    group = Group()
    async with auditing(group) as made:
        note(made)

    assert group.actions == ["kill"]


async def test_a_flood_of_acts_is_logged_and_recorded_in_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    most = int(audit.ALLOWANCES["ingress"][0] + audit.ALLOWANCES["own"][0])
    async with auditing(group) as made:
        for _ in range(most + 50):
            note(made, "resolve_awakeable", door="ingress")
        note(made, "kill")
        await made.settle(10)

    assert len(lines(caplog)) == most + 51
    assert group.actions.count("resolve_awakeable") == most and made.unrecorded == 50
    assert group.actions[-1] == "kill", "acts at the other door have an allowance of their own"
    assert sum(act.unrecorded for act in group.trail.acts) == 50


async def test_a_flood_by_one_token_does_not_hide_the_acts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audit.ALLOWANCES, "admin", (10, 0.0))
    group = Group()
    most = 10 + int(audit.ALLOWANCES["own"][0])
    async with auditing(group) as made:
        for _ in range(most + 5):
            note(made, "decide", principal=Principal("t2", "bob", (READ,)), status=404)
        note(made, "create_token")
        await made.settle(10)

    assert group.actions[-1] == "create_token" and made.unrecorded == 5


async def test_strangers_use_up_no_allowance_of_others_whatever_their_requests_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    most = int(audit.ALLOWANCES["admin"][0])
    async with auditing(group) as made:
        for status in (200, 400):
            for _ in range(most):
                note(made, "sign_in", principal=STRANGER, status=status)
        note(made, "create_token")
        await made.settle(10)

    assert group.actions[-1] == "create_token"
    assert len(lines(caplog)) == int(audit.ALLOWANCES["refused"][0]) + 1, "a stranger cannot fill a disk"


async def test_a_flood_of_refused_acts_is_logged_in_part_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    most = int(audit.ALLOWANCES["refused"][0])
    async with auditing(group) as made:
        for _ in range(most + 50):
            note(made, status=401, error="Unauthorized")
        note(made, "pause")
        await made.settle(10)

    assert len(lines(caplog)) == most + 1
    assert group.actions == ["kill"] * most + ["pause"]


async def test_a_flood_by_strangers_does_not_hide_the_refused_acts_of_a_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    most = int(audit.ALLOWANCES["refused"][0])
    async with auditing(group) as made:
        for _ in range(most + 5):
            note(made, "probe", principal=STRANGER, status=401, error="Unauthorized")
        note(made, "kill", status=403, error="Forbidden")
        for _ in range(most + 2):
            note(made, "purge", principal=Principal("t2", "bob", (READ,)), status=403, error="Forbidden")
        note(made, "drain", status=403, error="Forbidden")
        await made.settle(10)

    for actions in (group.actions, [line["action"] for line in lines(caplog)]):
        assert actions == ["probe"] * most + ["kill"] + ["purge"] * most + ["drain"]
    assert made.acts == 2 * most + 9 and made.unrecorded == 7


async def test_the_log_says_once_a_minute_how_many_refused_acts_are_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "SUMMARY_S", 0.05)
    monkeypatch.setitem(audit.ALLOWANCES, "refused", (1, 0.0))
    async with auditing(Group()) as made:
        for _ in range(4):
            note(made, principal=STRANGER, status=401)
        for _ in range(3):
            note(made, status=403)
        await eventually(lambda: len(caplog.records) >= 2)
        note(made, principal=STRANGER, status=401)

    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "3 more acts by strangers were not recorded",
        "2 more acts by known tokens were not recorded",
        "1 more acts by strangers were not recorded",
    ], "what is left when the node stops is in the log, too"


async def test_the_tokens_with_an_allowance_of_their_own_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KNOWN_MAX", 3)
    monkeypatch.setitem(audit.ALLOWANCES, "refused", (1, 0.0))
    group = Group()
    async with auditing(group) as made:
        for number in range(6):
            note(made, f"a{number}", principal=Principal(f"t{number}", "x", (READ,)), status=403)
        await made.settle(10)

    assert group.actions == ["a0", "a1", "a2", "a3"] and made.unrecorded == 2, "further tokens share an allowance"


async def test_before_all_nodes_know_the_trail_acts_are_in_the_log_of_the_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    async with auditing(group, is_open=False) as made:
        note(made)
        await made.settle(5)

    assert not group.tried and len(lines(caplog)) == 1


# -- the records of requests


async def test_every_node_knows_an_act_and_its_principal(tmp_path: Path) -> None:
    async with locked(tmp_path) as (cluster, doors):
        await cluster.led()
        token = await doors["n1"].create("operate")

        status, _ = await doors["n2"].ask("POST", "/cluster/nodes/n3/drain", token["token"])

        assert status == 200
        shown = None
        for name in doors:
            async with asyncio.timeout(10):
                while not (found := await acts(doors[name], "?action=drain")):
                    await asyncio.sleep(0.02)
            [act] = found
            assert shown in (None, act)
            shown = act
        assert shown is not None
        assert shown["principal"] == {"id": token["id"], "name": "tests"} and shown["address"] == "127.0.0.1"
        assert (shown["node"], shown["door"], shown["method"]) == ("n2", "admin", "POST")
        assert (shown["targets"], shown["outcome"], shown["status"]) == ({"name": "n3"}, "done", 200)
        assert not {*cluster.seats} - {*doors}


async def test_every_route_that_acts_is_audited_and_no_other(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        await acts(doors)
        for route in ROUTES:
            before = (await doors.ask("GET", "/audit?limit=1", doors.root))[1]["newest"]

            await doors.ask(route.method, place(route), doors.root)

            recorded = await acts(doors, f"?after={before}")
            assert [each["method"] for each in recorded] == ([route.method] if route.acts else []), route
            assert route.acts == (route.method not in ("GET", "HEAD") and not route.reads), route


async def test_acts_name_their_targets_and_neither_payloads_nor_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with one(tmp_path) as (world, doors):
        made = await doors.create("invoke")
        await doors.ask("POST", f"/tokens/{made['id']}/rotate", doors.root, value={"keep_old": "1h"})
        invocation = world.node.serving.router.mint("echo", None)
        awakeable = format_awakeable(invocation, 7)
        resolve = f"/holdfast/awakeables/{awakeable}/resolve"
        assert (await doors.ask("POST", resolve, made["token"], door="ingress", value="PAYLOAD"))[0] == 404
        await doors.ask(
            "POST", "/holdfast/workflow/flow/k1/promises/go/resolve", made["token"], door="ingress", value="PAYLOAD"
        )
        await doors.ask("PUT", "/services/flow/k1/state", doors.root, value={"values": {"a": "PAYLOAD"}})
        await doors.ask("POST", "/invocations/kill?service=echo&limit=5", doors.root)
        await doors.ask("POST", "/deployments", doors.root, value={"uri": "http://me:secret@127.0.0.1:9/"})

        found = {each["action"]: each for each in await acts(doors)}
        text = json.dumps(found) + caplog.text

        assert found["create_token"]["targets"] == {"id": made["id"], "name": "tests", "roles": "invoke"}
        assert found["create_token"]["principal"] == {"id": "node", "name": "this node's admin token"}
        assert found["rotate_token"]["targets"] == {"id": made["id"]}
        assert found["resolve_awakeable"]["targets"] == {"invocation": format_id(invocation), "step": "7"}
        assert (found["resolve_awakeable"]["outcome"], found["resolve_awakeable"]["error"]) == ("failed", "NotFound")
        assert found["resolve_promise"]["targets"] == {"service": "flow", "key": "k1", "promise": "go"}
        assert found["resolve_promise"]["outcome"] == "done" and found["resolve_promise"]["door"] == "ingress"
        assert found["set_state"]["targets"] == {"name": "flow", "key": "k1"}
        assert found["kill_many"]["targets"] == {
            "service": "echo", "limit": "5", "matched": "0", "done": "0", "unchanged": "0", "failed": "0",
        }  # fmt: skip
        assert found["register"]["outcome"] == "failed"
        for secret in ("PAYLOAD", "secret@", made["token"].rsplit("_", 1)[1], doors.root, awakeable):
            assert secret not in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/cluster/backups", {"to": "s3://KEY:HUSH@bucket/p"}),
        ("/cluster/backups", {"to": "s3://bucket/p?endpoint_url=https://u:HUSH@h"}),
        ("/cluster/nodes", {"name": "n9", "address": "u:HUSH@h:1"}),
        ("/deployments", {"uri": "http://u:HUSH@h:1"}),
    ],
)
async def test_credentials_in_a_refused_target_reach_neither_the_trail_nor_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, str]
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(tmp_path) as at:
        status, answer = await at.admin("POST", path, json=body)

        [act] = (await at.admin("GET", "/audit?outcome=failed"))[1]["acts"]
        assert status == act["status"] == 400 and "credentials" in answer["message"]
        assert "HUSH" not in json.dumps([answer, act]) + caplog.text


async def test_refused_acts_are_audited_and_refused_reads_are_not(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        reader = await doors.create("read")
        kill = f"/invocations/{format_id(InvocationId(bytes(16)))}/kill"

        assert (await doors.ask("POST", kill))[0] == 401
        assert (await doors.ask("POST", kill, "hf_nobody_secret"))[0] == 401
        assert (await doors.ask("POST", kill, reader["token"]))[0] == 403
        assert (await doors.ask("GET", "/tokens", reader["token"]))[0] == 403
        assert (await doors.ask("GET", "/tokens", "hf_nobody_secret"))[0] == 401
        resolve = "/holdfast/workflow/flow/k1/promises/go/resolve"
        assert (await doors.ask("POST", resolve, reader["token"], door="ingress"))[0] == 403
        assert (await doors.ask("POST", resolve, "hf_nobody_secret", door="ingress"))[0] == 401
        assert await doors.call("/echo/say", reader["token"]) == 403
        assert await doors.call("/echo/say", "hf_nobody_secret") == 401

        found = await acts(doors, "?outcome=refused")
        assert [(each["action"], each["status"], each["principal"]["id"]) for each in reversed(found)] == [
            ("kill", 401, None),
            ("kill", 401, None),
            ("kill", 403, reader["id"]),
            ("resolve_promise", 403, reader["id"]),
            ("resolve_promise", 401, None),
        ]
        assert {each["principal"]["name"] for each in found} == {"a stranger", "tests"}
        assert len(await acts(doors, "?outcome=403")) == 2


async def test_invocations_are_not_in_the_trail(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        before = world.node.doors.audit.acts

        for _ in range(5):
            assert await doors.call("/echo/say", doors.root) == 200
        assert (await doors.ask("POST", "/echo/say/send", doors.root, door="ingress", value=1))[0] == 202

        assert world.node.doors.audit.acts == before


async def test_the_trail_can_be_filtered_and_read_in_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        for number in range(5):
            await at.admin("POST", f"/cluster/nodes/none{number}/undrain")

        status, first = await at.admin("GET", "/audit?action=undrain&limit=2")
        assert status == 200
        _, second = await at.admin("GET", f"/audit?action=undrain&limit=2&cursor={first['cursor']}")
        _, third = await at.admin("GET", f"/audit?action=undrain&limit=2&cursor={second['cursor']}")

        names = [each["targets"]["name"] for page in (first, second, third) for each in page["acts"]]
        assert names == ["none4", "none3", "none2", "none1", "none0"] and third["cursor"] is None
        assert {each["principal"]["name"] for each in first["acts"]} == {ANYBODY.name}
        for query, count in [
            ("since=1h", 5), ("until=1h", 0), ("principal=anybody", 5), ("principal=ada", 0), ("outcome=failed", 5),
            ("outcome=done", 0), ("outcome=404", 5),
        ]:  # fmt: skip
            _, found = await at.admin("GET", f"/audit?action=undrain&{query}")
            assert len(found["acts"]) == count, query


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("outcome=fine", "done, refused, failed, unknown"),
        ("since=yesterday", "neither a time nor a duration"),
        ("limit=0", "whole number"),
        ("cursor=x", "whole number"),
        ("cursor=3&after=2", "either cursor or after"),
        ("who=ada", "there is no parameter"),
    ],
)
async def test_an_invalid_query_of_the_trail_is_refused_with_the_reason(tmp_path: Path, query: str, says: str) -> None:
    async with serving(tmp_path) as at:
        status, answer = await at.admin("GET", f"/audit?{query}")

        assert status == 400 and says in answer["message"] + str(answer["hint"])


async def test_the_trail_survives_a_restart_of_all_nodes(tmp_path: Path) -> None:
    async with locked(tmp_path) as (cluster, doors):
        await doors["n1"].create("read")
        sequences = [each["sequence"] for each in await acts(doors["n1"])]
        for seat in cluster.seats.values():
            await seat.kill()
        await asyncio.gather(*(seat.start() for seat in cluster.seats.values()))
        await cluster.led()
        async with aiohttp.ClientSession() as session:
            again = Doors(session, cluster.seats["n2"])
            assert sequences and [each["sequence"] for each in await acts(again)] == sequences
