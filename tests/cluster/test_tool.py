"""``longleaf cluster`` against the control plane."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from longleaf.cluster.bundle import cleaned
from longleaf.cluster.command import cluster_command
from tests.cluster.control_plane import ControlPlane, eventually
from tests.cluster.releases import Releases

NAMESPACE = "tended"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SECRET = "a-value-that-must-not-leave"


@pytest.fixture(scope="module")
def release(plane: ControlPlane, releases: Releases) -> Iterator[None]:
    plane.add_node("tended-1", {"nvidia.com/gpu.product": "any-gpu"}, gpus=8)
    releases.apply(
        *("install", NAMESPACE, "minimal"),
        engine__extraEnv=[{"name": "PRIVATE", "value": SECRET}],
        gateway__extraArgs=[f"--upstream-api-key={SECRET}"],
        gateway__podAnnotations={"note": SECRET},
    )
    eventually(
        lambda: [one for one in plane.items(PODS).values() if one["spec"].get("nodeName")],
        "pods are placed",
    )
    eventually(lambda: len(plane.items(PODS)) == 2, "both pods are made")
    plane.run_pod(NAMESPACE, "chat-longleaf-engine-0", "10.77.0.21")
    yield
    releases.helm("uninstall", "chat", "-n", NAMESPACE)
    for name in plane.items(PODS):
        plane.ask("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
    plane.ask("DELETE", "/api/v1/nodes/tended-1")


def _call(releases: Releases, plane: ControlPlane, *arguments: str) -> Result:
    kubectl = releases.tools.folder / "bin" / "kubectl"
    options = ("-n", NAMESPACE, "--release", "chat", "--kubectl", str(kubectl))
    config = ("--kubeconfig", str(plane.kubeconfig))
    return CliRunner().invoke(cluster_command, [*options, *config, *arguments])


def test_status_is_one_table(plane: ControlPlane, releases: Releases, release: None) -> None:
    done = _call(releases, plane, "status")
    assert done.exit_code == 0, done.output
    header, *lines = done.stdout.splitlines()
    assert header.split() == [
        "POD",
        "PART",
        "STATE",
        "READY",
        "RESTARTS",
        "NODE",
        "GPUS",
        "PRODUCT",
    ]
    engine = next(line for line in lines if "engine-0" in line)
    assert engine.split()[1:] == ["engine", "Running", "yes", "0", "tended-1", "8", "any-gpu"]
    assert len(lines) == 2


def test_a_bundle_holds_no_secret(
    plane: ControlPlane, releases: Releases, release: None, tmp_path: Path
) -> None:
    path = tmp_path / "bundle.tar.gz"
    done = _call(releases, plane, "bundle", str(path))
    assert done.exit_code == 0, done.output
    with tarfile.open(path) as archive:
        texts = {
            member.name.rpartition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    assert {"pods.json", "statefulsets.json", "events.json", "nodes.json"} <= set(texts)
    assert "chat-longleaf-engine-0" in texts["pods.json"]
    assert "tended-1" in texts["nodes.json"]
    assert "PRIVATE" in texts["statefulsets.json"]
    assert SECRET not in "".join(texts.values())


def test_what_is_cleaned() -> None:
    container = {
        "env": [{"name": "A", "value": "x"}, {"name": "B", "valueFrom": {"secretKeyRef": {}}}],
        "args": ["--api-key=x", "--api-key-file=/x", "--port=1"],
    }
    assert cleaned({"spec": [container], "annotations": {"a": "x"}, "managedFields": []}) == {
        "spec": [
            {
                "env": [
                    {"name": "A", "value": "(removed)"},
                    {"name": "B", "valueFrom": {"secretKeyRef": {}}},
                ],
                "args": ["--api-key=(removed)", "--api-key-file=(removed)", "--port=1"],
            }
        ],
        "annotations": {"a": "(removed)"},
    }


def test_drain_takes_an_engine_alone(
    plane: ControlPlane, releases: Releases, release: None
) -> None:
    done = _call(releases, plane, "drain", "chat-longleaf-engine-9")
    assert done.exit_code == 2
    assert "chat-longleaf-engine-0" in done.stderr
    done = _call(releases, plane, "drain", "chat-longleaf-engine-0", "--no-wait")
    assert done.exit_code == 0, done.output
    assert plane.ask("GET", "/api/v1/nodes/tended-1")["spec"]["unschedulable"] is True
    pod = plane.ask("GET", f"{PODS}/chat-longleaf-engine-0")
    assert pod["metadata"]["deletionTimestamp"]
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 15 + 120 + 60
    said = _call(releases, plane, "status").stdout
    assert "Draining" in said
    assert "tended-1 (cordoned)" in said


def test_no_kubectl_is_said(release: None, plane: ControlPlane) -> None:
    done = CliRunner().invoke(cluster_command, ["--kubectl", "/nowhere/kubectl", "status"])
    assert done.exit_code == 1
    assert "install kubectl" in done.stderr
