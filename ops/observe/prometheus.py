"""A Prometheus (and an Alertmanager) of the machine's own, with the project's rules."""

import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RULES = tuple(
    Path(__file__).resolve().parents[1] / "prometheus" / name
    for name in ("rules.yml", "alerts.yml")
)
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """What to scrape: ``address`` is ``host:port``; ``drop``: a metric to leave out."""

    job: str
    address: str
    drop: str = ""


class StartError(RuntimeError):
    """A process did not start; the message has its output."""


class QueryError(RuntimeError):
    """Prometheus refused a query."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus that runs."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """``data`` of an answer of its API; ``QueryError`` with its reason."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(json.loads(error.read())["error"]) from error

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query, now."""
        result: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return result


def configuration(
    targets: Sequence[Target], *, interval: str, namespace: str, alertmanager: str | None = None
) -> str:
    """Prometheus' configuration, as JSON, which is YAML too."""
    document: dict[str, Any] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [
            _scrape(job, [target for target in targets if target.job == job], namespace)
            for job in sorted({target.job for target in targets})
        ],
    }
    if alertmanager is not None:
        document["alerting"] = {
            "alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]
        }
    return json.dumps(document, indent=1)


def _scrape(job: str, targets: Sequence[Target], namespace: str) -> dict[str, Any]:
    addresses = [target.address for target in targets]
    found: dict[str, Any] = {
        "job_name": job,
        "static_configs": [{"targets": addresses, "labels": {"namespace": namespace}}],
    }
    if dropped := [target.drop for target in targets if target.drop]:
        rule = {"source_labels": ["__name__"], "regex": "|".join(dropped), "action": "drop"}
        found["metric_relabel_configs"] = [rule]
    return found


@contextmanager
def running_prometheus(directory: Path, config: str, *, port: int) -> Iterator[Prometheus]:
    """A Prometheus on 127.0.0.1 that keeps its data in ``directory``, once it is ready."""
    path = directory / "prometheus.yml"
    path.write_text(config)
    command = [
        *(_found("prometheus"), f"--config.file={path}"),
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with background(command, directory / "prometheus.log", f"http://127.0.0.1:{port}/-/ready"):
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def running_alertmanager(directory: Path, *, port: int) -> Iterator[str]:
    """An Alertmanager that tells nobody; gives its address."""
    path = directory / "alertmanager.yml"
    path.write_text(
        json.dumps({"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]})
    )
    command = [
        *(_found("prometheus-alertmanager"), f"--config.file={path}"),
        f"--storage.path={directory / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with background(command, directory / "alertmanager.log", f"http://127.0.0.1:{port}/-/ready"):
        yield f"127.0.0.1:{port}"


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed (apt-get install {name})")
    return path


@contextmanager
def running_gpu_exporter(directory: Path, *, port: int, recording: Path) -> Iterator[str]:
    """The GPU exporter on a recording; gives its address."""
    command = [
        *(sys.executable, "-m", "longleaf", "exporter", "gpu", "--port", str(port)),
        *("--replay", str(recording)),
    ]
    log = directory / "exporter.log"
    with background(command, log, f"http://127.0.0.1:{port}/metrics"):
        yield f"127.0.0.1:{port}"


@contextmanager
def background(command: Sequence[str], log: Path, ready: str) -> Iterator[None]:
    """Run ``command``, its output in ``log``, from when ``ready`` answers 200 to the end.
    ``StartError`` if it never does.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise StartError(f"{command[0]} did not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False
