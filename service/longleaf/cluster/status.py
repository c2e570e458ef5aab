"""Replicas and nodes of a release in one table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from longleaf.cluster.client import SERVING, is_ready, part_of

HEADER = ("POD", "PART", "STATE", "READY", "RESTARTS", "NODE", "GPUS", "PRODUCT")
_GPU = "nvidia.com/gpu"


def state_of(pod: Mapping[str, Any]) -> str:
    """One or two words: what a person asks first."""
    labels = pod["metadata"].get("labels", {})
    if pod["metadata"].get("deletionTimestamp") or labels.get(SERVING) == "false":
        return "Draining"
    status = pod.get("status", {})
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(kind) or ():
            waiting = one.get("state", {}).get("waiting")
            if waiting and waiting.get("reason") not in (None, "PodInitializing"):
                return f"{one['name']}: {waiting['reason']}"
            failed = one.get("state", {}).get("terminated")
            if failed and failed.get("exitCode"):
                return f"{one['name']}: failed"
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return str(condition.get("reason", "Pending"))
    return str(status.get("phase", "Unknown"))


def rows(
    pods: Iterable[Mapping[str, Any]], nodes: Iterable[Mapping[str, Any]]
) -> list[Sequence[str]]:
    """One row a pod, ordered by part and name; then one a node with GPUs that runs no engine."""
    by_name = {node["metadata"]["name"]: node for node in nodes}
    found: list[Sequence[str]] = []
    taken = set()
    for pod in pods:
        part, node = part_of(pod), pod["spec"].get("nodeName", "")
        if part == "engine":
            taken.add(node)
        statuses = pod.get("status", {}).get("containerStatuses") or ()
        restarts = sum(one.get("restartCount", 0) for one in statuses)
        found.append(
            (
                pod["metadata"]["name"],
                part,
                state_of(pod),
                "yes" if is_ready(pod) else "no",
                str(restarts),
                *_node_cells(node, by_name.get(node, {})),
            )
        )
    found.sort(key=lambda row: (row[1], row[0]))
    for name, node in sorted(by_name.items()):
        if name not in taken and _gpus(node) not in ("-", "0"):
            found.append(("-", "node", "No engine", "-", "-", *_node_cells(name, node)))
    return found


def _gpus(node: Mapping[str, Any]) -> str:
    return str(node.get("status", {}).get("allocatable", {}).get(_GPU, "-"))


def _node_cells(name: str, node: Mapping[str, Any]) -> tuple[str, str, str]:
    """Name and what is wrong with it, GPUs, product."""
    notes = ["cordoned"] if node.get("spec", {}).get("unschedulable") else []
    if node and not is_ready(node):
        notes.append("not ready")
    product = node.get("metadata", {}).get("labels", {}).get("nvidia.com/gpu.product", "-")
    shown = " ".join((name or "-", *([f"({', '.join(notes)})"] if notes else ())))
    return shown, _gpus(node), product


def table(lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns under the header."""
    everything = [HEADER, *lines]
    widths = [max(len(line[column]) for line in everything) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in everything
    )
