"""What the table says of pods and nodes in states that no control plane alone brings about."""

from typing import Any

import pytest

from longleaf.cluster.reasons import reasons
from longleaf.cluster.status import rows, state_of, table


def _pod(name: str = "a", **more: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": "engine", **more.pop("labels", {})}
    metadata = {"name": name, "labels": labels, **more.pop("metadata", {})}
    return {"metadata": metadata, "spec": more.pop("spec", {}), "status": more}


def _waiting(reason: str) -> list[dict[str, Any]]:
    return [{"name": "preflight", "state": {"waiting": {"reason": reason}}}]


def _ended(code: int) -> list[dict[str, Any]]:
    return [{"name": "preflight", "state": {"terminated": {"exitCode": code}}}]


UNPLACED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


@pytest.mark.parametrize(
    ("pod", "state"),
    [
        (_pod(phase="Running"), "Running"),
        (_pod(), "Unknown"),
        (_pod(phase="Pending", conditions=[UNPLACED]), "Unschedulable"),
        (
            _pod(phase="Pending", initContainerStatuses=_waiting("CrashLoopBackOff")),
            "preflight: CrashLoopBackOff",
        ),
        (_pod(phase="Pending", initContainerStatuses=_waiting("PodInitializing")), "Pending"),
        (_pod(phase="Pending", initContainerStatuses=_ended(1)), "preflight: failed"),
        (_pod(phase="Pending", initContainerStatuses=_ended(0)), "Pending"),
        (_pod(phase="Running", metadata={"deletionTimestamp": "now"}), "Draining"),
        (_pod(phase="Running", labels={"longleaf.dev/serving": "false"}), "Draining"),
        (_pod(phase="Running", labels={"longleaf.dev/serving": "true"}), "Running"),
        (_pod(phase="Running", containerStatuses=None, conditions=None), "Running"),
    ],
)
def test_one_or_two_words_say_what_a_pod_does(pod: dict[str, Any], state: str) -> None:
    assert state_of(pod) == state


def _node(name: str, ready: str, **more: Any) -> dict[str, Any]:
    status = {
        "allocatable": {"nvidia.com/gpu": more.pop("gpus", "8")},
        "conditions": [{"type": "Ready", "status": ready}],
    }
    return {"metadata": {"name": name}, "spec": more, "status": status}


def test_nodes_tell_what_keeps_engines_off() -> None:
    restarted = [{"name": "engine", "restartCount": 3, "state": {}}]
    pods = [
        _pod("b", spec={"nodeName": "gone"}, phase="Running"),
        _pod("a", spec={"nodeName": "one"}, phase="Running", containerStatuses=restarted),
    ]
    nodes = [
        _node("two", "Unknown", unschedulable=True),
        _node("one", "True"),
        _node("plain", "True", gpus="0"),
    ]
    found = rows(pods, nodes)
    assert [row[0] for row in found] == ["a", "b", "-"]
    assert found[0][4:] == ("3", "one", "8", "-")
    assert found[1][5:] == ("gone", "-", "-")
    assert found[2][2] == "No engine"
    assert found[2][5] == "two (cordoned, not ready)"
    lines = table(found).splitlines()
    assert len({line.index(word) for line, word in zip(lines, ("NODE", "one"), strict=False)}) == 1


def _event(kind: str, name: str, reason: str, message: str, when: str) -> dict[str, Any]:
    source = {"kind": kind, "name": name}
    return {"involvedObject": source, "reason": reason, "message": message, "lastTimestamp": when}


def _workload(name: str, asked: int, made: int) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"replicas": asked}, "status": {"replicas": made}}


def test_reasons_tell_what_keeps_pods_from_being_made() -> None:
    workloads = [_workload("c-engine", 2, 1), _workload("c-gateway", 2, 0), _workload("c-x", 1, 1)]
    events = [
        _event("StatefulSet", "c-engine", "FailedCreate", "no class", "2026-01-02"),
        _event("StatefulSet", "c-engine", "FailedCreate", "no quota", "2026-01-01"),
        _event("StatefulSet", "c-engine", "SuccessfulCreate", "made", "2026-01-03"),
        _event("ReplicaSet", "c-gateway-5f", "FailedCreate", "forbidden", "2026-01-01"),
        _event("ReplicaSet", "other-gateway-5f", "FailedCreate", "elsewhere", "2026-01-04"),
    ]
    assert list(reasons([], workloads, events)) == [
        "c-engine has 1 of 2 pods: no class",
        "c-gateway has 0 of 2 pods: forbidden",
    ]


def test_reasons_tell_what_pods_wait_for() -> None:
    said = "ok   driver: 580\nFAIL nccl: it hangs; fix: engine.nccl.disableP2P: true\n{}"
    ended = {"terminated": {"exitCode": 1, "message": said}}
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    image = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}
    unplaced = {**UNPLACED, "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}
    pods = [
        _pod("a", phase="Pending", conditions=[unplaced]),
        _pod(
            "b",
            phase="Pending",
            initContainerStatuses=[{"name": "preflight", "state": back_off, "lastState": ended}],
        ),
        _pod("c", phase="Pending", containerStatuses=[{"name": "engine", "state": image}]),
        _pod("d", phase="Pending"),
        _pod("e", phase="Succeeded"),
        _pod("f", phase="Running", conditions=[{"type": "Ready", "status": "True"}]),
    ]
    events = [
        _event("Pod", "d", "FailedMount", 'secret "keys" not found', "2026-01-01"),
        _event("Pod", "f", "FailedMount", "an older one", "2026-01-01"),
    ]
    assert list(reasons(pods, [], events)) == [
        "a: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        "b: preflight: FAIL nccl: it hangs; fix: engine.nccl.disableP2P: true",
        "c: engine: Back-off pulling image x",
        'd: secret "keys" not found',
    ]
