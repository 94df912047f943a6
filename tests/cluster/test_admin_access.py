"""What the admin API shows to whom, and texts that no name may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.admin.healths import WITHHELD, Healths
from holdfast.cluster.admin.parameters import AdminRequest
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.handlers.health import Health
from holdfast.cluster.http.access import Principal
from holdfast.cluster.http.exchange import Request, split_target
from holdfast.sdk.ids import DeploymentId
from holdfast.statemachine.access import ADMIN, OPERATE, READ
from tests.cluster.test_tokens import one

REFUSED = Health(
    "n1", DeploymentId("dp_1"), "http://10.0.0.9:22", 5, 3, "Connect call failed ('10.0.0.9', 22)", 9, 0, 4
)


def asked_by(*roles: str) -> AdminRequest:
    principal: Any = Principal("t1", "ada", roles)
    nothing: Any = None
    request = Request(
        exchange=nothing, method="GET", target="/", headers={}, body=nothing, principal=principal, gone=lambda: False
    )
    return AdminRequest(request, {}, {})


@pytest.mark.parametrize(
    ("role", "restricted", "shown"),
    [
        (ADMIN, False, REFUSED.last_error),
        (OPERATE, False, WITHHELD),
        (READ, False, WITHHELD),
        (READ, True, REFUSED.last_error),
    ],
)
async def test_the_reason_why_an_address_does_not_answer_is_no_port_scanner(
    role: str, restricted: bool, shown: str
) -> None:
    async def everywhere(deployment: str | None, invocation: Any) -> list[Health]:
        return [REFUSED, REFUSED._replace(last_error="", down_since_ms=0)]

    down, up = await Healths(everywhere, open_to_all=restricted).of(asked_by(role), None)

    assert down == REFUSED._replace(last_error=shown)
    assert up.last_error == "", "nothing is withheld where nothing failed"


async def test_text_that_is_not_unicode_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        for path, body in (
            ("/tokens", {"name": "a", "roles": ["invoke"], "services": ["\ud800"]}),
            ("/cluster/nodes", {"name": "n9", "address": "\ud800:1"}),
            ("/cluster/backups", {"to": "/x/\ud800"}),
            ("/deployments", {"uri": "http://127.0.0.1:1", "metadata": {"a": "\udc00"}}),
        ):
            status, answer = await doors.ask("POST", path, doors.root, value=body)
            assert (status, "not Unicode" in answer["message"]) == (400, True), path


@pytest.mark.parametrize("target", ["127.0.0.1:80", "*", "example:80/x"])
def test_a_target_that_is_no_path_is_refused(target: str) -> None:
    with pytest.raises(BadRequest, match="not a path"):
        split_target(target)


def test_a_whole_url_is_a_target() -> None:
    assert split_target("http://h:1/a/b?c=d") == (["a", "b"], {"c": "d"})
