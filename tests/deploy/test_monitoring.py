"""Alerts and dashboards name metrics that exist, and each alert leads to a section of the runbook.

promtool checks the expressions themselves where it is installed (Debian: apt-get install prometheus).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from docs import generate
from holdfast.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
#: What Prometheus adds.
OF_PROMETHEUS = {"up"}

TEXT = {"type": "string", "minLength": 1}
RULES = {
    "type": "object",
    "required": ["groups"],
    "additionalProperties": False,
    "properties": {
        "groups": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "additionalProperties": False,
                "properties": {
                    "name": TEXT,
                    "rules": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr", "labels", "annotations"],
                            "additionalProperties": False,
                            "properties": {
                                "alert": {"type": "string", "pattern": "^Holdfast[A-Z][A-Za-z]+$"},
                                "expr": TEXT,
                                "for": {"type": "string", "pattern": "^[0-9]+[smh]$"},
                                "labels": {
                                    "type": "object",
                                    "required": ["severity"],
                                    "properties": {"severity": {"enum": ["page", "ticket"]}},
                                },
                                "annotations": {
                                    "type": "object",
                                    "required": ["summary", "description", "runbook"],
                                    "additionalProperties": False,
                                    "properties": {"summary": TEXT, "description": TEXT, "runbook": TEXT},
                                },
                            },
                        },
                    },
                },
            },
        }
    },
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "description", "datasource", "gridPos", "targets"],
    "properties": {
        "type": {"enum": ["timeseries", "stat"]},
        "title": TEXT,
        "description": TEXT,
        "gridPos": {"type": "object", "required": ["x", "y", "w", "h"]},
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "required": ["expr", "refId", "datasource", "legendFormat"]},
        },
    },
}
DASHBOARD = {
    "type": "object",
    "required": ["uid", "title", "description", "tags", "panels", "templating", "time", "schemaVersion"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-z-]{1,40}$"},
        "panels": {
            "type": "array",
            "minItems": 4,
            "items": {
                "if": {"properties": {"type": {"const": "row"}}},
                "then": {"required": ["title", "gridPos"]},
                "else": PANEL,
            },
        },
    },
}


@cache
def known() -> frozenset[str]:
    """The names of all time series."""
    names = set(OF_PROMETHEUS)
    for family in asyncio.run(generate.metric_families()):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, [""])}
    return frozenset(names)


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = re.sub(r'"[^"]*"|\$\w+|\{\{.*?\}\}', "", expression)
    return set(re.findall(r"\b(?:holdfast|process|python)_\w+|\bup\b", bare))


def alerts() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels(path: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(path.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def anchors() -> set[str]:
    page = (ROOT / "docs" / "runbook.md").read_text()
    return {title.strip().lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", page, re.MULTILINE)}


def test_the_alerts_have_the_form_that_prometheus_wants() -> None:
    loaded = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())

    jsonschema.validate(loaded, RULES)
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len({*names})


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_each_alert_reads_metrics_that_exist_and_leads_to_the_runbook(rule: dict[str, Any]) -> None:
    read = names_in(rule["expr"])

    assert read and read <= known(), read - known()
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/runbook.md" and anchor in anchors()
    assert rule["alert"] in section(anchor), "the runbook says which alerts lead there"


def section(anchor: str) -> str:
    page = (ROOT / "docs" / "runbook.md").read_text()
    found = {
        part.split("\n", 1)[0].strip().lower().replace(" ", "-"): part
        for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    }
    return found[anchor]


@pytest.mark.parametrize("anchor", sorted(anchors()))
def test_each_section_of_the_runbook_has_symptom_view_and_remedy_and_an_alert(anchor: str) -> None:
    text = section(anchor)

    assert [word for word in ("**Symptom.**", "**How to see it.**", "**What to do.**") if word not in text] == []
    assert any(rule["annotations"]["runbook"].endswith(f"#{anchor}") for rule in alerts())


def test_the_runbook_names_commands_options_and_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    lines = re.findall(r"^(holdfast .*?)(?: +#.*)?$", page, re.MULTILINE)
    inline = re.findall(r"`(holdfast [^`]+)`", " ".join(page.split()))

    assert len(lines) > 10 and len(inline) > 10
    for text in [*lines, *inline]:
        command: click.Command = main
        options = {name for parameter in command.params for name in parameter.opts}
        for word in text.split()[1:]:
            found = command.commands.get(word) if isinstance(command, click.Group) else None
            if found is not None:
                command = found
                options |= {name for parameter in command.params for name in parameter.opts}
            elif word.startswith("--"):
                assert word in options, text
        assert not isinstance(command, click.Group) or command.invoke_without_command, text
    assert names_in(page) - known() == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_dashboard_has_the_form_that_grafana_wants(path: Path) -> None:
    loaded = json.loads(path.read_text())

    jsonschema.validate(loaded, DASHBOARD)
    ids = [panel["id"] for panel in loaded["panels"]]
    assert len(ids) == len({*ids}) and loaded["uid"] == path.stem
    places = {
        (x, y)
        for panel in loaded["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in loaded["panels"]), "overlaps"
    assert max(x for x, _ in places) < 24


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_panel_reads_metrics_and_variables_that_exist(path: Path) -> None:
    loaded = json.loads(path.read_text())
    variables = {each["name"] for each in loaded["templating"]["list"]} | {"__rate_interval"}
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]

    for panel in panels(path):
        for target in panel["targets"]:
            read = names_in(target["expr"])
            assert read and read <= known(), (panel["title"], read - known())
            assert {*re.findall(r"\$(\w+)", target["expr"])} <= variables, panel["title"]
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == source["uid"]
    for each in loaded["templating"]["list"]:
        assert names_in(each["query"]["query"]) <= known()


def test_a_metric_that_does_not_exist_is_noticed() -> None:
    assert names_in('sum(rate(holdfast_nothing_total{a="holdfast_b"}[5m])) by (up_to)') == {"holdfast_nothing_total"}
    assert "holdfast_nothing_total" not in known() and "holdfast_ingress_seconds_bucket" in known()


def test_the_compose_file_gives_prometheus_its_alerts_and_grafana_its_dashboards() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    places = {volume.split(":")[1]: volume.split(":")[0] for volume in services["prometheus"]["volumes"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/holdfast.yml").read_text())["providers"]
    shown = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}

    assert [places[file] for file in prometheus["rule_files"]] == ["./deploy/prometheus/alerts.yml"]
    assert shown[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert shown["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / "dashboards" / Path(home).name).exists()


def check(tmp_path: Path, *expressions: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "rules.yml"
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    return subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@needs_promtool
def test_promtool_accepts_the_alerts_and_the_configuration(tmp_path: Path) -> None:
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    here = tmp_path / "prometheus.yml"
    (tmp_path / "token").write_text("hf_a_b")
    here.write_text(
        config.replace("/etc/prometheus/alerts.yml", str(DEPLOY / "prometheus" / "alerts.yml")).replace(
            "/run/prometheus/token", str(tmp_path / "token")
        )
    )

    checked = subprocess.run(["promtool", "check", "config", str(here)], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(alerts())} rules found" in checked.stdout


@needs_promtool
def test_promtool_accepts_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    found = [
        target["expr"].replace("$__rate_interval", "1m").replace("$service", ".*").replace("$instance", ".*")
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]

    checked = check(tmp_path, *found)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert check(tmp_path, "sum(").returncode != 0


@needs_promtool
def test_the_alerts_fire_for_what_they_are_about_and_not_otherwise(tmp_path: Path) -> None:
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    {"series": 'holdfast_partition_without_leader{instance="n1",partition="3"}', "values": "1x20"},
                    {"series": 'holdfast_partition_without_leader{instance="n2",partition="3"}', "values": "1x20"},
                    {"series": 'holdfast_partition_without_leader{instance="n1",partition="4"}', "values": "1x20"},
                    {"series": 'holdfast_partition_without_leader{instance="n2",partition="4"}', "values": "0x20"},
                    {"series": 'holdfast_disk_free_bytes{instance="n1"}', "values": "10x40"},
                    {"series": 'holdfast_disk_size_bytes{instance="n1"}', "values": "100x40"},
                    {"series": 'holdfast_invocations{service="trips",status="paused"}', "values": "2x40"},
                ],
                "alert_rule_test": [
                    {
                        "eval_time": "5m",
                        "alertname": "HoldfastQuorumLost",
                        "exp_alerts": [expected("HoldfastQuorumLost", "3", partition="3")],
                    },
                    {
                        "eval_time": "15m",
                        "alertname": "HoldfastDiskFilling",
                        "exp_alerts": [expected("HoldfastDiskFilling", "10%", instance="n1")],
                    },
                    {
                        "eval_time": "10m",
                        "alertname": "HoldfastInvocationsPaused",
                        "exp_alerts": [expected("HoldfastInvocationsPaused", "2", service="trips")],
                    },
                    {"eval_time": "10m", "alertname": "HoldfastBackupOld", "exp_alerts": []},
                ],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(test))

    tested = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)

    assert tested.returncode == 0, tested.stdout + tested.stderr


def expected(alert: str, value: str, **labels: str) -> dict[str, Any]:
    (rule,) = (each for each in alerts() if each["alert"] == alert)
    written = {}
    for name, template in rule["annotations"].items():
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], template)
        written[name] = re.sub(r"\{\{ \$value[^}]*\}\}", value, text)
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": written}
