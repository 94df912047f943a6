"""What can be said of Dockerfile, compose file and Kubernetes manifests without an engine: they fit each other and the code."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from holdfast.cluster import config
from holdfast.snapshots.stores import parse_s3_url

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES_VERSION = "1.34"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def manifests() -> list[dict[str, Any]]:
    return [
        document for document in yaml.safe_load_all((ROOT / "deploy/kubernetes/holdfast.yaml").read_text()) if document
    ]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (document for document in manifests() if document["kind"] == kind)
    return found


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets for every container."""
    return dict(re.findall(r"(HOLDFAST_[A-Z_]+)=(\S+)", (ROOT / "Dockerfile").read_text()))


def settings(environment: dict[str, str], secret: Path) -> config.Config:
    """As a node in the container would read them."""
    return config.load(None, {**image_environment(), **environment, "HOLDFAST_SECRET_FILE": str(secret)})


NODES = ("n1", "n2", "n3")


@pytest.mark.parametrize("name", NODES)
def test_each_node_of_the_compose_file_reads_its_environment(name: str) -> None:
    node = compose()["services"][name]

    read = settings(node["environment"], ROOT / "deploy/demo-secret")

    assert read.node == name
    assert sorted({name, *read.peers}) == sorted(NODES)
    assert read.ingress.port == 8080 and read.ingress.host == "0.0.0.0"
    assert f"{name}:/data" in node["volumes"] and str(read.data) == "/data"


def test_the_compose_file_names_only_what_is_there() -> None:
    loaded = compose()

    for service in loaded["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in loaded["volumes"] or (ROOT / source).exists(), volume
        for other in service.get("depends_on", {}):
            assert other in loaded["services"]
    module, _, variable = loaded["services"]["hello"]["entrypoint"][-1].partition(":")
    assert callable(getattr(importlib.import_module(module), variable)), "an ASGI application"
    assert (ROOT / loaded["secrets"]["cluster"]["file"]).exists()


def test_the_sample_service_listens_where_other_containers_reach_it() -> None:
    words = compose()["services"]["hello"]["entrypoint"]

    assert words[words.index("--host") + 1] == "0.0.0.0", "loopback is the container's own"


def test_the_nodes_keep_their_snapshots_in_the_bucket_that_is_there() -> None:
    services = compose()["services"]
    minio, environment = services["minio"], services["n1"]["environment"]
    place = parse_s3_url(environment["HOLDFAST_SNAPSHOTS"])

    assert place.endpoint_url == "http://minio:9000"
    assert f"mkdir -p /data/{place.bucket} " in minio["entrypoint"][-1]
    given = (environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"])
    assert given == (minio["environment"]["MINIO_ROOT_USER"], minio["environment"]["MINIO_ROOT_PASSWORD"])


def test_prometheus_scrapes_every_node_where_it_serves_metrics() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]

    assert scrape["static_configs"][0]["targets"] == [f"{name}:9070" for name in NODES]
    assert scrape["metrics_path"] == "/metrics"


@pytest.mark.parametrize("document", manifests(), ids=lambda document: str(document["kind"]))
def test_each_manifest_fits_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_each_pod_reads_its_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    pods = [f"holdfast-{number}" for number in range(of_kind("StatefulSet")["spec"]["replicas"])]

    for pod in pods:
        read = settings({**of_kind("ConfigMap")["data"], "HOLDFAST_NODE": pod}, tmp_path / "secret")

        assert sorted({pod, *read.peers}) == pods == list(read.founders)
        assert read.health == config.Endpoint("0.0.0.0", container_port("health"))
        assert all(place.host == f"{name}.holdfast-peers" for name, place in read.peers.items())


def container_port(name: str) -> int:
    (container,) = of_kind("StatefulSet")["spec"]["template"]["spec"]["containers"]
    (port,) = (int(port["containerPort"]) for port in container["ports"] if port["name"] == name)
    return port


def test_a_pod_is_not_told_of_services_and_is_probed_where_a_hung_node_still_answers() -> None:
    pod = of_kind("StatefulSet")["spec"]["template"]["spec"]

    assert pod["enableServiceLinks"] is False
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
