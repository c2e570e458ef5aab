"""What support asks for, without secrets and without prompts.

Objects of the release, its nodes and events, and the logs of gateways and preflight. Secrets are
never read. Values of environment variables and annotations are taken out, and so are arguments
that hold a key; engines' logs stay out, for SGLang can be told to log requests.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longleaf.cluster.kubectl import Kubectl, KubectlError

KINDS = ("pods", "statefulsets", "deployments", "services", "endpointslices", "networkpolicies")
REMOVED = "(removed)"
_LOG_LINES = "2000"


def cleaned(value: Any) -> Any:
    """A copy without what may hold a secret."""
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for name, item in value.items():
        if name == "managedFields":
            continue
        if name == "annotations" and isinstance(item, Mapping):
            kept[name] = dict.fromkeys(item, REMOVED)
        elif name == "env" and isinstance(item, list):
            kept[name] = [_variable(one) for one in item]
        elif name in ("args", "command") and isinstance(item, list):
            kept[name] = [_argument(str(one)) for one in item]
        else:
            kept[name] = cleaned(item)
    return kept


def _variable(one: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**one, "value": REMOVED} if "value" in one else one


def _argument(text: str) -> str:
    flag, equals, _ = text.partition("=")
    secret = any(word in flag.lower() for word in ("key", "token", "secret", "password"))
    return f"{flag}={REMOVED}" if secret and equals else text


def parts(kubectl: Kubectl) -> Iterator[tuple[str, str]]:
    """Name and text of each file; one that cannot be had says why."""
    for kind in KINDS:
        yield f"{kind}.json", _attempt(lambda kind=kind: _objects(kubectl, kind))
    yield "events.json", _attempt(lambda: _objects(kubectl, "events", "--ignore-not-found"))
    yield "nodes.json", _attempt(lambda: _objects(kubectl, "nodes", "--ignore-not-found"))
    try:
        pods = kubectl.list("pods")
    except KubectlError:
        return
    for pod in pods:
        name = pod["metadata"]["name"]
        names = [one["name"] for one in pod["spec"].get("initContainers", ())]
        names += [one["name"] for one in pod["spec"]["containers"]]
        for container in set(names) & {"gateway", "preflight"}:
            arguments = ("logs", name, "--container", container, "--tail", _LOG_LINES)
            yield (
                f"logs/{name}-{container}.txt",
                _attempt(lambda arguments=arguments: kubectl.run(*arguments)),
            )


def _objects(kubectl: Kubectl, kind: str, *more: str) -> str:
    return json.dumps(cleaned(kubectl.list(kind, *more)), indent=1)


def _attempt(ask: Any) -> str:
    try:
        return str(ask())
    except KubectlError as error:
        return f"not to be had: {error}\n"


def write(kubectl: Kubectl, path: Path) -> int:
    """Write a .tar.gz of all parts; returns how many there are."""
    count = 0
    with tarfile.open(path, "w:gz") as archive:
        for name, text in parts(kubectl):
            data = text.encode()
            info = tarfile.TarInfo(f"longleaf-{kubectl.release}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            count += 1
    return count
