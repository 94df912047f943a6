"""Checks of Dockerfile, compose file and Kubernetes manifests without an engine: they match each other and the code."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from holdfast.cli.main import main
from holdfast.cluster import config
from holdfast.cluster.advice import advise, find_open_doors
from holdfast.cluster.errors import Forbidden
from holdfast.cluster.http.access import open_root
from holdfast.cluster.http.browsers import Browsers
from holdfast.snapshots.stores import parse_s3_url
from tests.cli.running import running

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES_VERSION = "1.34"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def manifests() -> list[dict[str, Any]]:
    return [
        document for document in yaml.safe_load_all((ROOT / "deploy/kubernetes/holdfast.yaml").read_text()) if document
    ]


def of_kind(kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = (
        document
        for document in manifests()
        if document["kind"] == kind and name in (None, document["metadata"]["name"])
    )
    return found


def image_environment() -> dict[str, str]:
    """The environment that the Dockerfile sets for every container."""
    return dict(re.findall(r"(HOLDFAST_[A-Z_]+)=(\S+)", (ROOT / "Dockerfile").read_text()))


def settings(environment: dict[str, str], secrets: Path) -> config.Config:
    """The settings that a node in the container would read."""
    files = {name: secrets / Path(environment[name]).name for name in SECRET_FILES}
    return config.load(
        None, {**image_environment(), **environment, **{name: str(file) for name, file in files.items()}}
    )


def make_compose_secrets(folder: Path) -> None:
    """What the service `secrets` does before the nodes start."""
    service = compose()["services"]["secrets"]
    script = service["command"][0].replace("$$", "$").replace("/run/holdfast", str(folder))
    subprocess.run([*service["entrypoint"], script], check=True)


NODES = ("n1", "n2", "n3")
SECRET_FILES = ("HOLDFAST_SECRET_FILE", "HOLDFAST_ADMIN_TOKEN_FILE")


@pytest.mark.parametrize("name", NODES)
def test_each_node_of_the_compose_file_reads_its_environment(tmp_path: Path, name: str) -> None:
    node = compose()["services"][name]
    make_compose_secrets(tmp_path)

    read = settings(node["environment"], tmp_path)

    assert read.node == name and read.founders == NODES
    assert read.auth == "tokens" and open_root(read).startswith("hf_node_")
    assert find_open_doors(read) is None and advise(read) == []
    assert sorted({name, *read.peers}) == sorted(NODES)
    assert read.ingress.port == 8080 and read.ingress.host == "0.0.0.0"
    assert f"{name}:/data" in node["volumes"] and str(read.data) == "/data"


def test_the_compose_file_names_only_existing_things() -> None:
    loaded = compose()

    for service in loaded["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in loaded["volumes"] or (ROOT / source).exists(), volume
        for other in service.get("depends_on", {}):
            assert other in loaded["services"]
    module, _, variable = loaded["services"]["hello"]["entrypoint"][-1].partition(":")
    assert callable(getattr(importlib.import_module(module), variable)), "an ASGI application"


def test_the_compose_file_makes_its_secrets_once_for_the_user_of_the_nodes_alone(tmp_path: Path) -> None:
    make_compose_secrets(tmp_path)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    make_compose_secrets(tmp_path)

    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == made
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
    services = compose()["services"]
    writers = [name for name, each in services.items() if "secrets:/run/holdfast" in each.get("volumes", [])]
    readers = {name for name, each in services.items() if "secrets:/run/holdfast:ro" in each.get("volumes", [])}
    assert writers == ["secrets"] and readers == {*NODES, "holdfast", "register", "prometheus-token"}
    folders = re.findall(
        r"mkdir /data (/run/\S+) (/run/\S+) && chown holdfast:holdfast", (ROOT / "Dockerfile").read_text()
    )
    assert folders == [("/run/holdfast", "/run/prometheus")], "a new volume belongs to whom the image says"


def test_the_compose_file_publishes_no_admin_api_and_nothing_beyond_this_machine() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:") and not port.endswith(":9070"), (name, port)


def test_the_header_of_the_compose_file_names_services_and_commands_that_are_there() -> None:
    header = (ROOT / "docker-compose.yml").read_text().split("\n\n")[0]
    services = compose()["services"]

    tools = re.findall(r"docker compose run --rm (?:-T )?(\S+?)`?(?: (.*?))?[`)\n]", header)

    assert {name for name, _ in tools} == {"register", "holdfast"}
    for name, arguments in tools:
        assert services[name]["image"] == "holdfast" and services[name]["profiles"] == ["tools"]
        words = arguments.split() or services[name]["command"]
        assert CliRunner().invoke(main, [*words, "--help"]).exit_code == 0, words


def test_prometheus_gets_a_token_that_can_read_and_nothing_else(tmp_path: Path) -> None:
    services = compose()["services"]
    service = services["prometheus-token"]
    script = (
        service["command"][0].replace("/run/prometheus", str(tmp_path)).replace("/tmp/token", str(tmp_path / "new"))
    )
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    with running(tmp_path / "node", auth="tokens", register=False) as cli:
        (root,) = tmp_path.rglob("admin-token")
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOLDFAST_ADMIN_URL": cli.at.node.doors.urls.admin,
            "HOLDFAST_TOKEN_FILE": str(root),
        }
        for _ in range(2):
            subprocess.run([*service["entrypoint"], script], env=environ, check=True)
        token = (tmp_path / Path(scrape["authorization"]["credentials_file"]).name).read_text().strip()

        assert ask(cli.at.node.doors.urls.admin + "/metrics", token) == 200
        assert ask(cli.at.node.doors.urls.admin + "/tokens", token) == 403
        assert len(cli.json("token", "list", token=root.read_text().strip())["tokens"]) == 1
    assert "prometheus-token:/run/prometheus:ro" in services["prometheus"]["volumes"]


def ask(url: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_sample_service_listens_where_other_containers_reach_it() -> None:
    words = compose()["services"]["hello"]["entrypoint"]

    assert words[words.index("--host") + 1] == "0.0.0.0", "loopback is the container's own"


def test_the_nodes_keep_their_snapshots_in_the_existing_bucket() -> None:
    services = compose()["services"]
    minio, environment = services["minio"], services["n1"]["environment"]
    place = parse_s3_url(environment["HOLDFAST_SNAPSHOTS"])

    assert place.endpoint_url == "http://minio:9000"
    assert f"mkdir -p /data/{place.bucket} " in minio["entrypoint"][-1]
    given = (environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"])
    assert given == (minio["environment"]["MINIO_ROOT_USER"], minio["environment"]["MINIO_ROOT_PASSWORD"])
    assert "ports" not in minio, "everybody knows its password"


def test_prometheus_scrapes_every_node_where_it_serves_metrics() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]

    assert scrape["static_configs"][0]["targets"] == [f"{name}:9070" for name in NODES]
    assert scrape["metrics_path"] == "/metrics"
    assert scrape["authorization"] == {"credentials_file": "/run/prometheus/token"}


@pytest.mark.parametrize("document", manifests(), ids=lambda document: str(document["kind"]))
def test_each_manifest_fits_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_each_pod_reads_its_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "admin-token").write_text("hf_node_" + "0" * 64)
    environment = pod_environment("orders")
    pods = [f"holdfast-{number}" for number in range(of_kind("StatefulSet")["spec"]["replicas"])]

    for pod in pods:
        read = settings({**of_kind("ConfigMap")["data"], **environment, "HOLDFAST_NODE": pod}, tmp_path)

        assert sorted({pod, *read.peers}) == pods == list(read.founders)
        assert read.health == config.HostPort("0.0.0.0", container_port("health"))
        assert all(place.host == f"{name}.holdfast-peers" for name, place in read.peers.items())
        assert read.auth == "tokens" and find_open_doors(read) is None and open_root(read)


def pod_environment(namespace: str) -> dict[str, str]:
    """What the manifest writes into the environment of a container, with its variables filled in."""
    (container,) = of_kind("StatefulSet")["spec"]["template"]["spec"]["containers"]
    return {
        each["name"]: each["value"].replace("$(NAMESPACE)", namespace) for each in container["env"] if "value" in each
    }


@pytest.mark.parametrize(("name", "door"), [("holdfast", "ingress"), ("holdfast-admin", "admin")])
def test_each_door_has_a_service_of_its_own_whose_names_a_pod_knows(name: str, door: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "admin-token").write_text("hf_node_" + "0" * 64)
    service = of_kind("Service", name)
    (port,) = service["spec"]["ports"]
    data = {**of_kind("ConfigMap")["data"], **pod_environment("orders"), "HOLDFAST_NODE": "holdfast-0"}
    browsers = Browsers(settings(data, tmp_path), door)

    assert (service["spec"]["type"], port["targetPort"]) == ("ClusterIP", door)
    for suffix in ("", ".orders", ".orders.svc", ".orders.svc.cluster.local"):
        browsers.check("GET", "/", {"Host": f"{name}{suffix}:{port['port']}"})
    browsers.check("GET", "/", {"Host": f"10.4.5.6:{port['port']}"})  # The kubelet.
    with pytest.raises(Forbidden):
        browsers.check("GET", "/", {"Host": f"{name}.evil.example"})


def test_only_nodes_reach_peers_and_only_labelled_pods_reach_the_admin_api() -> None:
    policy = of_kind("NetworkPolicy")["spec"]
    pod = {"matchLabels": of_kind("StatefulSet")["spec"]["template"]["metadata"]["labels"]}
    allowed = {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]}

    assert policy["podSelector"] == pod and policy["policyTypes"] == ["Ingress"]
    assert all(len(rule["ports"]) == 1 for rule in policy["ingress"])
    assert allowed == {
        "peer": [{"podSelector": pod}],
        "ingress": [{"podSelector": {}}],
        "admin": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"holdfast.dev/admin": "true"}}}],
    }
    assert all(container_port(name) for name in allowed)


def container_port(name: str) -> int:
    (container,) = of_kind("StatefulSet")["spec"]["template"]["spec"]["containers"]
    (port,) = (int(port["containerPort"]) for port in container["ports"] if port["name"] == name)
    return port


def test_a_pod_has_no_service_variables_and_is_probed_where_a_hung_node_still_answers() -> None:
    pod = of_kind("StatefulSet")["spec"]["template"]["spec"]

    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["livenessProbe"]["httpGet"] == {"path": "/health", "port": "health"}


def test_a_pod_runs_as_the_user_of_the_image_and_can_write_its_volume_only() -> None:
    pod = of_kind("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user = int(re.findall(r"^USER (\d+):", (ROOT / "Dockerfile").read_text(), re.M)[0])

    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == user
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/holdfast/health"


def test_a_disruption_leaves_a_majority() -> None:
    replicas = of_kind("StatefulSet")["spec"]["replicas"]

    assert 2 * (replicas - of_kind("PodDisruptionBudget")["spec"]["maxUnavailable"]) > replicas


def test_docker_compose_accepts_the_file() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("there is no docker client with the compose plugin on this machine")

    checked = subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr
