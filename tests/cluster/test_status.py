"""What the table says of pods and nodes in states that no control plane alone brings about."""

from typing import Any

import pytest

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
