"""What support asks for, without secrets and without prompts.

Objects of the release, its nodes and events, the logs of gateways and preflight, and what gateways
count. Secrets are never read. Values of environment variables and annotations are taken out, and
whatever looks like a key wherever it stands. Engines' logs stay out, for SGLang can be told to log
requests; a gateway's never holds a word of a prompt.
"""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from longleaf import __version__
from longleaf.cluster.client import Cluster, ClusterError, part_of

REMOVED = "(removed)"
_LOGGED = ("gateway", "preflight")
_LOG_LINES = 2000
_NAME = r"[\w.-]*(?:key|token(?!s|iz)|secret|passw)[\w.-]*"
_FLAG = re.compile(rf"--?{_NAME}", re.I)
_PAIR = re.compile(
    rf"({_NAME}[\"']?\s*[=:]\s*[\"']?)(?!true\b|false\b|null\b)[^\s\"',;&{{}}\[\]]+", re.I
)
_BARE = re.compile(r"\b(Bearer\s+|sk-|hf_|nvapi-|ghp_|eyJ)[\w.~+/=-]{6,}")
"""Credentials that tell by their first letters what they are."""


def scrubbed(text: str) -> str:
    """Text without what looks like a key."""
    return _BARE.sub(REMOVED, _PAIR.sub(rf"\1{REMOVED}", text))


def cleaned(value: Any) -> Any:
    """A copy of a JSON object without what may hold a secret."""
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, str):
        return _BARE.sub(REMOVED, value)
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for name, item in value.items():
        if name == "managedFields":
            continue
        if name == "annotations" and isinstance(item, Mapping):
            kept[name] = dict.fromkeys(item, REMOVED)
        elif name in ("env", "httpHeaders") and isinstance(item, list):
            kept[name] = [{**one, "value": REMOVED} if "value" in one else one for one in item]
        elif name in ("args", "command") and isinstance(item, list):
            kept[name] = list(_arguments([str(one) for one in item]))
        elif name == "message" and isinstance(item, str):
            kept[name] = scrubbed(item)
        else:
            kept[name] = cleaned(item)
    return kept


def _arguments(words: Sequence[str]) -> Iterator[str]:
    """``--key=value``, ``--key value`` and KEY=value within scripts lose their values."""
    hidden = False
    for word in words:
        if hidden and not word.startswith("-"):
            yield REMOVED
            hidden = False
            continue
        hidden = _FLAG.fullmatch(word) is not None
        yield scrubbed(word)


def parts(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Name and text of each file; one that cannot be had says why."""
    yield "longleaf.json", json.dumps({"version": __version__, "release": cluster.release})
    for name, ask in cluster.objects():
        yield f"{name}.json", _attempt(partial(_json, ask))
    try:
        pods = cluster.pods()
    except ClusterError:
        return
    for pod in pods:
        name, spec = pod["metadata"]["name"], pod["spec"]
        containers = {one["name"] for one in (*spec.get("initContainers", ()), *spec["containers"])}
        for container in sorted(containers & set(_LOGGED)):
            yield f"logs/{name}-{container}.txt", _attempt(partial(_log, cluster, name, container))
        if part_of(pod) == "gateway":
            yield f"metrics/{name}.txt", _attempt(partial(cluster.gateway_metrics, name))


def _json(ask: Callable[[], Any]) -> str:
    return json.dumps(cleaned(ask()), indent=1)


def _log(cluster: Cluster, pod: str, container: str) -> str:
    return scrubbed(cluster.log(pod, container, _LOG_LINES))


def _attempt(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except ClusterError as error:
        return f"not to be had: {error}\n"


def write(cluster: Cluster, path: Path) -> int:
    """Write a .tar.gz of all parts; returns how many there are."""
    count = 0
    with tarfile.open(path, "w:gz") as archive:
        for name, text in parts(cluster):
            data = text.encode()
            info = tarfile.TarInfo(f"longleaf-{cluster.release}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            count += 1
    return count
