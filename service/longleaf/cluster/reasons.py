"""What keeps pods of a release from being made, placed or ready: a sentence each."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from longleaf.cluster.client import Object, is_ready

_TOLD = {"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}
"""Reasons of events that no pod's own state repeats."""


def reasons(
    pods: Iterable[Object], workloads: Iterable[Object], events: Iterable[Object]
) -> Iterator[str]:
    """One for each workload with too few pods, and for each pod that is not ready.

    workloads: stateful sets and deployments. events: of the namespace.
    """
    last = _last(events)
    for one in workloads:
        name, asked = one["metadata"]["name"], one["spec"].get("replicas", 1)
        made = one.get("status", {}).get("replicas") or 0
        if made < asked:
            # A deployment's pods are made by a replica set of its name and a hash.
            said = [
                text
                for (kind, source), text in last.items()
                if source == name or (kind == "ReplicaSet" and source.rpartition("-")[0] == name)
            ]
            yield f"{name} has {made} of {asked} pods" + "".join(f": {text}" for text in said[-1:])
    for pod in pods:
        if is_ready(pod) or pod.get("status", {}).get("phase") == "Succeeded":
            continue
        name = pod["metadata"]["name"]
        said = [*_of_pod(pod.get("status", {})), *filter(None, [last.get(("Pod", name))])]
        yield from (f"{name}: {text}" for text in dict.fromkeys(said))


def _last(events: Iterable[Object]) -> dict[tuple[str, str], str]:
    """The last message of each object, by kind and name; the newest at the end."""
    told = [one for one in events if one.get("reason") in _TOLD]
    told.sort(key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "")
    found: dict[tuple[str, str], str] = {}
    for one in told:
        source = one["involvedObject"]
        key = source.get("kind", ""), source.get("name", "")
        found.pop(key, None)
        found[key] = one.get("message", "")
    return found


def _of_pod(status: Mapping[str, Any]) -> Iterator[str]:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            yield condition.get("message") or condition.get("reason") or "is not placed"
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(kind) or ():
            state, before = one.get("state") or {}, one.get("lastState") or {}
            for ended in (state.get("terminated"), before.get("terminated")):
                faults = [line for line in _lines(ended) if line.startswith("FAIL ")]
                yield from (f"{one['name']}: {line}" for line in faults)
                if faults:
                    break
            else:
                if message := (state.get("waiting") or {}).get("message"):
                    yield f"{one['name']}: {message}"


def _lines(ended: Mapping[str, Any] | None) -> list[str]:
    """Preflight's own: the kubelet keeps the end of its log."""
    return str((ended or {}).get("message") or "").splitlines()
