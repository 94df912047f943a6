"""Commands that show facts: counts, lists, trees, keys, and what waits."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.sdk.journal import Op
from tests.cli.running import Cli, running
from tests.cluster.harness import Handled


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_statistics_have_a_row_per_service_and_their_sum(cli: Cli) -> None:
    cli.ok("call", "echo/say", "1")
    cli.ok("call", "counter/x/add")

    text = cli.ok("statistics")

    assert "echo" in text and "counter" in text and "TOTAL" in text
    assert cli.json("statistics")["services"]["counter"]["succeeded"] == 1


def test_lists_are_filtered_and_ordered(cli: Cli) -> None:
    first = cli.ok("send", "flaky/stop").strip()
    cli.reaches(first, "paused")
    second = cli.ok("send", "flaky/stop").strip()
    cli.reaches(second, "paused")
    cli.ok("call", "counter/order-7/add")

    oldest = cli.json("invocations", "list", "--service", "flaky", "--order", "oldest")["invocations"]
    text = cli.ok("invocations", "list", "--failure", "CODE HAS")

    assert [each["id"] for each in oldest] == [first, second]
    assert first in text and "the code has changed" in text
    assert "order-7" in cli.ok("invocations", "list", "--key-prefix", "order-", "--completed-since", "1h")
    assert cli.ok("invocations", "list", "--parent", first) == "No invocations match.\n"


def test_a_dry_run_says_how_many_would_be_acted_on(cli: Cli) -> None:
    for _ in range(2):
        cli.reaches(cli.ok("send", "payments/pay").strip(), "paused")

    text = cli.ok("invocations", "cancel", "--service", "payments", "--dry-run")
    counted = cli.json("invocations", "cancel", "--service", "payments", "--dry-run", "--limit", "1")
    wrong = cli.run("invocations", "cancel", "inv_1", "--dry-run")

    assert text == "cancel would act on 2 invocations with service payments. Nothing was changed.\n"
    assert counted == {"action": "cancel", "matched": 1, "more": True}
    assert wrong.exit_code == 2
    assert len(cli.json("invocations", "list", "--service", "payments", "--status", "paused")["invocations"]) == 2


def test_keys_are_listed_with_what_they_hold(cli: Cli) -> None:
    cli.ok("call", "counter/keys-1/add")
    holder = cli.ok("send", "counter/keys-2/wait").strip()
    cli.reaches(holder, "suspended")
    waiting = cli.ok("send", "counter/keys-2/add").strip()
    cli.reaches(waiting, "queued")
    workflow = cli.ok("send", "signup/keys-3/run").strip()
    cli.reaches(workflow, "suspended")

    text = cli.ok("state", "keys", "counter", "--prefix", "keys-")
    found = {each["key"]: each for each in cli.json("state", "keys", "counter", "--prefix", "keys-")["keys"]}
    queue = cli.ok("state", "queue", "counter", "keys-2")

    assert "keys-1" in text and holder in text
    assert found["keys-1"]["values"] == 1 and found["keys-2"]["waiting"] == 1
    assert holder in queue and waiting in queue
    assert "No invocation holds" in cli.ok("state", "queue", "counter", "keys-1")
    assert "approved" in cli.ok("state", "promises", "signup", "keys-3")
    assert cli.ok("state", "promises", "signup", "nothing") == "No promises.\n"
    assert cli.run("state", "keys", "echo").exit_code == 1
    cli.ok("invocations", "kill", holder)


def test_state_is_edited_in_an_editor_unless_it_changed_meanwhile(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edits(code: str) -> None:
        """Replace the editor by this program."""
        script = tmp_path / "editor.py"
        script.write_text(f"import json, pathlib, sys\npath = pathlib.Path(sys.argv[1])\n{code}\n")
        monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")

    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cli.ok("state", "set", "counter", "edited", "count=1", 'name="ann"', "old=true")

    edits("path.write_text(json.dumps({'count': 1, 'name': 'bob', 'list': [1]}))")
    text = cli.ok("state", "edit", "counter", "edited")
    edits("path.write_text(path.read_text() + ' ')")
    again = cli.ok("state", "edit", "counter", "edited")
    address = cli.at.node.doors.urls.admin + "/services/counter/edited/state"
    edits(
        "import urllib.request as web\n"
        f"body = json.dumps({{'values': {{'name': 'eve'}}}}).encode()\n"
        f"web.urlopen(web.Request({address!r}, body, {{'Content-Type': 'application/json'}}, method='PUT'))\n"
        "path.write_text(path.read_text().replace('bob', 'dan'))"
    )
    raced = cli.run("state", "edit", "counter", "edited")
    edits("path.write_text('[')")
    wrong = cli.run("state", "edit", "counter", "edited")

    assert "bob" in text and "old" not in text
    assert again == "Nothing changed.\n"
    assert raced.exit_code == 1 and "the state has changed: name" in raced.stderr
    [kept] = re.findall(r"your text is in (\S+)", raced.stderr)
    assert json.loads(Path(kept).read_text())["name"] == "dan"
    assert wrong.exit_code == 1 and "not JSON" in wrong.stderr
    assert cli.json("state", "get", "counter", "edited")["state"] == {"count": 1, "name": "eve", "list": [1]}


def test_what_waits_is_listed_by_kind(cli: Cli) -> None:
    agent = cli.ok("send", "agent/wait").strip()
    cli.reaches(agent, "suspended")
    doubt = cli.ok("send", "payments/pay").strip()
    cli.reaches(doubt, "paused")
    later = cli.ok("send", "echo/say", "1", "--delay", "1h").strip()

    text = cli.ok("waiting")
    timers = cli.ok("waiting", "--kind", "timer", "--service", "echo")
    decisions = cli.json("waiting", "--kind", "in-doubt")["waiting"]

    assert agent in text and doubt in text and later not in text
    assert later in timers and "start" in timers and agent not in timers
    assert doubt in [each["invocation"] for each in decisions] and {each["name"] for each in decisions} == {"pay"}
    assert cli.ok("waiting", "--service", "nothing") == "Nothing waits.\n"
    assert cli.run("waiting", "--kind", "godot").exit_code == 1


async def calls_echo(handled: Handled) -> None:
    if handled.length == 1:
        handled.wait_for(handled.step(Op.CALL, "0/call/0", ["echo", "say", None, handled.input, {}]))
    else:
        handled.output(b'"called"')


def test_an_invocation_is_shown_with_its_tree_and_its_values(cli: Cli) -> None:
    cli.at.endpoint.add("outer/run", calls_echo)
    cli.ok("deployments", "register", cli.at.endpoint.uri, "--force")
    large = json.dumps("x" * 100_000)
    root = cli.ok("send", "outer/run", "-", input=large).strip()
    cli.reaches(root, "completed")
    tree = cli.json("invocations", "describe", root, "--tree")
    child = tree["nodes"][1]["id"]

    lines = cli.ok("invocations", "describe", child, "--tree").splitlines()

    assert lines[0].startswith(f"outer/run  {root}  succeeded after ")
    assert lines[1].startswith(f"└─ step 1: echo/say  {child}  succeeded after ") and lines[1].endswith("← this one")
    trip = cli.ok("send", "trips/book", "1").strip()
    cli.reaches(trip, "completed")
    steps = cli.ok("invocations", "describe", trip, "--tree").splitlines()
    assert [re.split(" {2,}", line)[:2] for line in steps[1:]] == [
        ["├─ step 1: run", "flight"], ["├─ step 2: run", "hotel"], ["└─ step 3: run", "car"],
    ]  # fmt: skip
    assert '{"booked": "car"}' in steps[3]
    assert re.search(r"calls and sends +1", cli.ok("invocations", "describe", root))
    assert f"{root}, step 1" in cli.ok("invocations", "describe", child)
    assert cli.ok("invocations", "value", child) == large + "\n"
    assert cli.ok("invocations", "value", root, "1", "--input") == large + "\n"
    assert cli.ok("invocations", "value", root) == '"called"\n'
    assert cli.json("invocations", "value", root) == {"id": root, "value": "called"}
    assert "there is no step 7" in cli.run("invocations", "value", root, "7").stderr


def test_a_dry_run_of_a_registration_prints_what_would_change(cli: Cli) -> None:
    cli.ok("deployments", "register", cli.at.endpoint.uri, "--force")
    unchanged = cli.ok("deployments", "register", cli.at.endpoint.uri, "--dry-run")
    cli.at.endpoint.services["echo"]["handlers"].append({"name": "shout", "mode": "plain"})
    try:
        refused = cli.run("deployments", "register", cli.at.endpoint.uri, "--dry-run")
        forced = cli.ok("deployments", "register", cli.at.endpoint.uri, "--dry-run", "--force")
        shown = json.loads(cli.run("deployments", "register", cli.at.endpoint.uri, "--dry-run", "--json").stdout)
    finally:
        cli.at.endpoint.services["echo"]["handlers"].pop()

    assert "nothing would change" in unchanged
    assert refused.exit_code == 1 and "echo/shout: new plain handler" in refused.stdout
    assert "would be refused without --force" in forced and "Nothing was registered." in forced
    assert shown["dry_run"] is True and not shown["created"] and len(shown["breaks"]) == 1
    assert "shout" not in cli.ok("services", "describe", "echo")


def test_the_status_of_the_cluster_has_the_vitals_of_nodes(cli: Cli) -> None:
    text = cli.ok("cluster", "status")

    assert re.search(r"UP +DISK FREE +MEMORY +LOOP LAG", text)
    assert re.search(r"n1 .* active .* GiB \(\d+%\) +\d+\.\d MiB +\d+ ms", text)
