"""Generate clients from the OpenAPI documents of a running node, and call the node with them: `make openapi-client`.

The generator is openapi-python-client, in an environment of its own (`.venv-openapi`), because it and what it generates need
packages that are not ours. So CI does not run this: it validates the documents (tests/cluster/test_openapi.py), and compares
every answer with them (`tests.answers`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.ports import free_ports

ROOT: Final = Path(__file__).resolve().parent.parent
ENVIRONMENT: Final = ROOT / ".venv-openapi"
START_S: Final = 60.0

#: Runs beside the generated packages. They are made of plain functions, one for each operation.
CALLS: Final = """
import sys

from holdfast_admin import Client as Admin
from holdfast_admin.api.default import (
    cluster, create_webhook, delete_webhook, deployments, invocation, invocations, journal, restart, statistics,
)
from holdfast_admin.models import Error, NewWebhook, NewWebhookEventsItem, WebhookWithSecret
from holdfast_ingress import Client as Ingress
from holdfast_ingress.api.default import output
from holdfast_ingress.api.trips import trips_book, trips_book_send
from holdfast_ingress.models import Accepted, Trip


def main(admin_url, ingress_url):
    admin, ingress = Admin(base_url=admin_url), Ingress(base_url=ingress_url)
    receipt = trips_book.sync(client=ingress, body=Trip(name="Ann", to="Lisbon"), idempotency_key="1")
    assert receipt.flight.startswith("flight-"), receipt
    accepted = trips_book_send.sync(client=ingress, body=Trip(name="Ann", to="Lisbon"), idempotency_key="1")
    assert isinstance(accepted, Accepted) and accepted.status == "PreviouslyAccepted", accepted
    id_ = accepted.invocation_id
    assert output.sync_detailed(id_, client=ingress).status_code == 200

    page = invocations.sync(client=admin, service="trips", limit=10)
    assert [row.id for row in page.invocations] == [id_] and page.cursor is None, page
    found = invocation.sync(id_, client=admin)
    assert found.status == "completed" and found.end == "succeeded", found
    assert found.created_at < found.completed_at and found.parent is None, found
    assert found.outcome.value["flight"] == receipt.flight, found
    steps = journal.sync(id_, client=admin).steps
    assert [step.op for step in steps] == ["input", "run", "run", "run"], steps
    restarted = restart.sync(id_, client=admin, step=0)
    assert restarted.status == "Restarted" and restarted.new_id != id_, restarted
    missing = invocation.sync("inv_1", client=admin)
    assert isinstance(missing, Error) and missing.code == 400 and missing.hint, missing

    assert deployments.sync(client=admin).deployments[0].services[0].name == "trips"
    view = cluster.sync(client=admin)
    assert view.nodes[0].condition == "ok" and view.partitions[0].role == "leader", view
    assert statistics.sync(client=admin).totals.invoked >= 2
    events = [NewWebhookEventsItem("failed")]
    hook = create_webhook.sync(client=admin, body=NewWebhook(url="https://alerts.example/holdfast", events=events))
    assert isinstance(hook, WebhookWithSecret) and hook.services == [], hook
    assert delete_webhook.sync(hook.id, client=admin).deleted
    print("the generated clients called", view.cluster, "at level", view.level)


main(*sys.argv[1:])
"""


@contextmanager
def running_node(folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of the admin API and of the ingress of a node with the example of trips."""
    log = folder / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "dev", "--app", "examples.trips:app", "--partitions", "1",
             "--port", "0", "--admin-port", "0", "--handlers-port", str(free_ports(1)[0])],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while " serves " not in (text := log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the node did not start: {text}")
            time.sleep(0.05)
        addresses = dict(re.findall(r"^ *(admin|ingress) +(http://\S+)", text, re.MULTILINE))
        yield addresses["admin"], addresses["ingress"]
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(START_S)


def generate(url: str, folder: Path, name: str) -> None:
    document = folder / f"{name}.json"
    with urllib.request.urlopen(url, timeout=START_S) as answer:
        document.write_bytes(answer.read())
    subprocess.run(
        [ENVIRONMENT / "bin" / "openapi-python-client", "generate", "--path", document, "--meta", "none",
         "--output-path", folder / name],
        check=True, cwd=folder, env={**os.environ, "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}"},
    )  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_node(folder) as (admin, ingress):
            generate(f"{admin}/openapi.json", folder, "holdfast_admin")
            generate(f"{ingress}/holdfast/openapi.json", folder, "holdfast_ingress")
            calls = folder / "calls.py"
            calls.write_text(CALLS)
            subprocess.run([ENVIRONMENT / "bin" / "python", calls, admin, ingress], check=True, cwd=folder)


if __name__ == "__main__":
    main()
