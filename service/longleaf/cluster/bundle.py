"""What support asks for, without secrets and without prompts.

Objects of the release, its nodes and events, the logs of gateways, preflight and probes, and what
gateways count. Secrets are never read, and `scrub` takes out what may be one wherever it stands.
Engines' logs stay out, for SGLang can be told to log requests; the others never hold a word of a
prompt.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from longleaf import __version__
from longleaf.cluster.client import Cluster, ClusterError, part_of
from longleaf.cluster.scrub import cleaned, scrubbed

_LOGGED = ("gateway", "preflight", "probe")
_LOG_LINES = 2000


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
            yield f"metrics/{name}.txt", _attempt(partial(_metrics, cluster, name))


def _json(ask: Callable[[], Any]) -> str:
    return json.dumps(cleaned(ask()), indent=1)


def _log(cluster: Cluster, pod: str, container: str) -> str:
    return scrubbed(cluster.log(pod, container, _LOG_LINES))


def _metrics(cluster: Cluster, pod: str) -> str:
    return scrubbed(cluster.gateway_metrics(pod))


def _attempt(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except ClusterError as error:
        return f"not to be had: {error}\n"


def write(cluster: Cluster, path: Path) -> int:
    """Write a .tar.gz of all parts, for its owner alone; returns how many there are.

    Errors: ``ClusterError``, of a release that is not there too; ``OSError``.
    """
    cluster.expect_release()
    count = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(file, "wb") as output, tarfile.open(fileobj=output, mode="w:gz") as archive:
        os.fchmod(file, 0o600)
        for name, text in parts(cluster):
            data = text.encode()
            info = tarfile.TarInfo(f"longleaf-{cluster.release}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            count += 1
    return count
