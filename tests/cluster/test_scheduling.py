"""Where the real scheduler places an engine, on nodes as the GPU operator labels them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane, eventually
from tests.cluster.releases import Releases

NAMESPACE = "placing"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POD = f"{PODS}/chat-longleaf-engine-0"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
RIGHT = {
    "nvidia.com/gpu.product": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "nvidia.com/gpu.compute.major": "12",
    "nvidia.com/gpu.count": "8",
}
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
RESERVED = {"key": "example.com/reserved", "value": "training", "effect": "NoSchedule"}


@pytest.fixture
def nodes(plane: ControlPlane) -> Iterator[None]:
    yield
    plane.remove_all("/api/v1/nodes")


@contextmanager
def _engine(
    plane: ControlPlane, releases: Releases, shape: str = "default", **values: Any
) -> Iterator[None]:
    releases.apply("install", NAMESPACE, shape, gateway__replicas=0, **values)
    try:
        eventually(lambda: plane.find(POD), "the engine's pod is made")
        yield
    finally:
        releases.helm("uninstall", "chat", "-n", NAMESPACE)
        plane.remove_all(PODS)
        eventually(lambda: plane.items(PODS) == {}, "the pods are gone")


def _refusals(plane: ControlPlane) -> list[str]:
    pod = plane.ask("GET", POD)["metadata"]["uid"]
    return [
        one["message"]
        for one in plane.ask("GET", EVENTS)["items"]
        if one["reason"] == "FailedScheduling" and one["involvedObject"].get("uid") == pod
    ]


def _node_of(plane: ControlPlane) -> str | None:
    node: str | None = plane.ask("GET", POD)["spec"].get("nodeName")
    return node


def _placed(plane: ControlPlane, node: str) -> str:
    """Where the engine lands.

    Each look changes a label of the node: a change makes the scheduler try again what it held
    back, which it does by itself once a minute only.
    """
    numbers = count()

    def look() -> str | None:
        found = _node_of(plane)
        if found is None:
            plane.label_node(node, {"look": str(next(numbers))})
        return found

    return eventually(look, "the engine is placed", pause=1.0)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"labels": {**RIGHT, "nvidia.com/gpu.product": "NVIDIA-H200"}, "gpus": 8}, "affinity"),
        ({"labels": {**RIGHT, "nvidia.com/gpu.compute.major": "9"}, "gpus": 8}, "affinity"),
        ({"labels": {**RIGHT, "nvidia.com/gpu.count": "7"}, "gpus": 7}, "affinity"),
        ({"labels": RIGHT, "gpus": 7}, "Insufficient nvidia.com/gpu"),
        ({"labels": RIGHT, "gpus": 8, "taints": [GPU_TAINT, RESERVED]}, "taint"),
    ],
    ids=["product", "capability", "count-label", "seven-gpus", "tainted"],
)
def test_a_wrong_node_leaves_the_engine_pending(
    plane: ControlPlane, releases: Releases, nodes: None, node: dict[str, Any], why: str
) -> None:
    plane.add_node("wrong", **node)
    with _engine(plane, releases):
        eventually(
            lambda: [said for said in _refusals(plane) if why in said and "0/1" in said],
            f"the scheduler refuses the node: {why}",
        )
        assert _node_of(plane) is None
        plane.add_node("right", RIGHT, gpus=8, taints=[GPU_TAINT])
        assert _placed(plane, "right") == "right"


def test_a_node_takes_one_engine(plane: ControlPlane, releases: Releases, nodes: None) -> None:
    plane.add_node("right", RIGHT, gpus=8, taints=[GPU_TAINT])
    with _engine(plane, releases):
        assert _placed(plane, "right") == "right"
        releases.apply("upgrade", NAMESPACE, "default", gateway__replicas=0, engine__replicas=2)
        second = f"{PODS}/chat-longleaf-engine-1"
        eventually(lambda: plane.find(second), "the second is made")
        eventually(
            lambda: [
                one
                for one in plane.ask("GET", EVENTS)["items"]
                if one["involvedObject"]["name"].endswith("engine-1")
                and "Insufficient nvidia.com/gpu" in one["message"]
            ],
            "the second waits for GPUs",
        )
        assert "nodeName" not in plane.ask("GET", second)["spec"]


def test_multi_node_takes_a_node_each(plane: ControlPlane, releases: Releases, nodes: None) -> None:
    """Though two engines would fit on a node."""
    names = {f"right-{number}" for number in range(4)}
    labels = {**RIGHT, "nvidia.com/gpu.count": "16"}
    for name in names:
        zone = {"topology.kubernetes.io/zone": f"zone-{int(name[-1]) % 2}"}
        plane.add_node(name, {**labels, **zone}, gpus=16, taints=[GPU_TAINT])
    with _engine(plane, releases, "multi-node", model__volume__type="hostPath"):
        found = eventually(
            lambda: (
                taken
                if len(taken := [one["spec"].get("nodeName") for one in plane.items(PODS).values()])
                == 4
                and all(taken)
                else None
            ),
            "four engines are placed",
        )
        assert set(found) == names
