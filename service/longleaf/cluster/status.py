"""Pods and nodes of a release in one table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HEADER = ("POD", "PART", "STATE", "READY", "RESTARTS", "NODE", "GPUS", "PRODUCT")
_GPU = "nvidia.com/gpu"


def state_of(pod: Mapping[str, Any]) -> str:
    """One or two words: what a person asks first."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Draining"
    status = pod.get("status", {})
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(kind, ()):
            waiting = one.get("state", {}).get("waiting")
            if waiting and waiting.get("reason") not in (None, "PodInitializing"):
                return f"{one['name']}: {waiting['reason']}"
            failed = one.get("state", {}).get("terminated")
            if failed and failed.get("exitCode"):
                return f"{one['name']}: failed"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return str(condition.get("reason", "Pending"))
    return str(status.get("phase", "Unknown"))


def rows(
    pods: Iterable[Mapping[str, Any]], nodes: Iterable[Mapping[str, Any]]
) -> list[Sequence[str]]:
    """One row a pod, ordered by part and name."""
    by_name = {node["metadata"]["name"]: node for node in nodes}
    found: list[Sequence[str]] = []
    for pod in pods:
        node = pod["spec"].get("nodeName", "")
        described = by_name.get(node, {})
        conditions = {one["type"]: one for one in pod.get("status", {}).get("conditions", ())}
        ready = conditions.get("Ready", {}).get("status") == "True"
        restarts = sum(
            one.get("restartCount", 0) for one in pod.get("status", {}).get("containerStatuses", ())
        )
        labels = described.get("metadata", {}).get("labels", {})
        cordoned = described.get("spec", {}).get("unschedulable", False)
        found.append(
            (
                pod["metadata"]["name"],
                pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", "-"),
                state_of(pod),
                "yes" if ready else "no",
                str(restarts),
                f"{node or '-'}{' (cordoned)' if cordoned else ''}",
                str(described.get("status", {}).get("allocatable", {}).get(_GPU, "-")),
                labels.get("nvidia.com/gpu.product", "-"),
            )
        )
    return sorted(found, key=lambda row: (row[1], row[0]))


def table(lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns under the header."""
    everything = [HEADER, *lines]
    widths = [max(len(line[column]) for line in everything) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in everything
    )
