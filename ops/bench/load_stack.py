"""What the load benchmark runs: engines or stand-ins, a gateway before them, the load tests."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ops.bench.gateway_peers import ROOT, TOKENIZER
from ops.bench.leftovers import check_free

LOAD_PYTHON = ROOT / ".venv-loadtest" / "bin" / "python"
_ENGINE_PORT, _PORT, _METRICS_PORT = 9700, 9690, 9691
_START_SECONDS = 180.0
_STOP_SECONDS = 30.0
GATEWAY_URL = f"http://127.0.0.1:{_PORT}"


@dataclass(frozen=True, slots=True)
class Stack:
    """Process ids, the engines' base URLs."""

    engines: int
    gateway: int
    urls: tuple[str, ...]

    def lost_seconds(self) -> float:
        """How far simulated replicas fell behind their curve, the worst of them."""
        return max(
            (_sample(url, "longleaf_simulation_lost_seconds") for url in self.urls), default=0
        )


@contextmanager
def running(
    folder: Path,
    engine: Sequence[str],
    replicas: int,
    gateway: Sequence[str] = (),
    cores: Collection[int] = (),
) -> Iterator[Stack]:
    """``longleaf <engine>``, on ``cores`` alone where some are given, and a gateway before its
    ``replicas``, once all are ready. ``click.ClickException`` where a port is taken.
    """
    ports = [_ENGINE_PORT + number for number in range(replicas)]
    check_free([*ports, _PORT, _METRICS_PORT])
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    before = [*engine, "--port", str(_ENGINE_PORT)]
    front = ["gateway", "--port", str(_PORT), "--metrics-port", str(_METRICS_PORT)]
    front += [part for url in urls for part in ("--replica", url)]
    front += ["--tokenizer", str(TOKENIZER), *gateway]
    with _process(folder / "engine.log", before, cores) as engines:
        _wait(urls[-1] + "/health", engines, folder / "engine.log")
        with _process(folder / "gateway.log", front) as own:
            _wait(GATEWAY_URL + "/readyz", own, folder / "gateway.log", replicas)
            yield Stack(engines.pid, own.pid, urls)


def load(out: Path, *arguments: str) -> dict[str, Any]:
    """Run the load tests against the gateway; their report."""
    command = [str(LOAD_PYTHON), "-m", "longleaf_load", "--url", GATEWAY_URL, "--out", str(out)]
    _load_tests(command + list(arguments))
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def record_curve(
    out: Path, name: str, contexts: str, batches: str, answers: str, *arguments: str
) -> tuple[Path, Path]:
    """Record the curve of the engine behind the gateway, directly; curve and commit_len."""
    command = [str(LOAD_PYTHON), "-m", "longleaf_load", "--url", f"http://127.0.0.1:{_ENGINE_PORT}"]
    command += ["--record-curve", name, "--contexts", contexts, "--batches", batches]
    command += ["--answers", answers, *arguments]
    _load_tests([*command, "--out", str(out)])
    return out / f"{name}.json", out / f"{name}-commit_len.json"


def _load_tests(command: Sequence[str]) -> None:
    paths = os.pathsep.join((str(ROOT / "loadtest"), str(ROOT / "service")))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False)
    if done.returncode > 1:  # 1: the objective was missed, which is a finding
        raise click.ClickException(f"the load tests ended with {done.returncode}")


@contextmanager
def core_apart() -> Iterator[frozenset[int]]:
    """One core, for an engine, which this process and what it starts keep off meanwhile; none where
    there is only one.
    """
    every = os.sched_getaffinity(0)
    apart = frozenset({min(every)} if len(every) > 1 else ())
    os.sched_setaffinity(0, every - apart)
    try:
        yield apart
    finally:
        os.sched_setaffinity(0, every)


@contextmanager
def _process(
    log: Path, arguments: Sequence[str], cores: Collection[int] = ()
) -> Iterator["subprocess.Popen[bytes]"]:
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*pinned, sys.executable, "-m", "longleaf", *arguments], stdout=file, stderr=file
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path, ready: int = 0) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(url, timeout=5) as answer:
                body = answer.read()
            if not ready or json.loads(body)["ready_replicas"] == ready:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise click.ClickException(f"{url} is not ready: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def _sample(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + "{"):
                return float(line.rsplit(" ", 1)[1])
    return 0.0
