"""P10: bad input gets a clear error, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from tests.promises.handlers import add, read
from tests.promises.processes import World, world


async def refused(here: World, method: str, url: str, status: int, **more: Any) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.request(method, url, **more) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, (url, response.status, answer)
        assert answer["code"] == status and answer["message"], answer
        return answer


async def test_the_answer_to_every_kind_of_bad_request_says_what_to_do(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.client() as client:
        assert await client.call(add, "before", key="k") == 1
        url, admin = here.node.url, here.node.admin

        assert "register" in (await refused(here, "POST", f"{url}/nobody/home", 404))["hint"]
        assert "handlers are" in (await refused(here, "POST", f"{url}/three/nothing", 404))["hint"]
        await refused(here, "GET", f"{url}/three/quick", 405)
        await refused(here, "POST", f"{url}/three/quick", 413, data=b"x" * (5 << 20))
        wrong = await refused(
            here, "POST", f"{url}/three/quick", 400, data=b"{not json", headers={"Content-Type": "application/json"}
        )
        assert wrong["source"] == "invocation"
        await refused(here, "POST", f"{url}/three/quick/send?delay=soon", 400, data=b'"x"')
        await refused(here, "GET", f"{url}/holdfast/invocation/inv_zz/output", 400)
        await refused(here, "GET", f"{url}/holdfast/invocation/inv_{'0' * 32}/output", 404)
        await refused(here, "POST", f"{admin}/deployments", 400, data=b"[]")
        await refused(here, "POST", f"{admin}/deployments", 400, json={"uri": "ftp://nowhere"})

        assert await client.call(read, key="k") == 1


async def test_a_corrupt_journal_stops_the_node_with_a_message_that_names_it(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.client() as client:
        await client.call(add, "before", key="k")
        here.node.kill()
        journal = here.node.data / "log" / "data.mdb"
        whole = journal.read_bytes()
        journal.write_bytes(whole[: len(whole) // 2])
        here.node.start()
        code = await wait_for_end(here)

        assert code != 0
        assert "data.mdb" in here.node.tail() and "torn" in here.node.tail()
        journal.write_bytes(whole)
        here.node.start()
        await here.ready()
        assert await client.call(read, key="k") == 1, "the journal itself was not touched"


async def wait_for_end(here: World) -> int:
    from tests.promises.processes import eventually

    await eventually(lambda: not here.node.running, "the node refuses")
    child = here.node._child
    assert child is not None and child.returncode is not None
    return child.returncode
