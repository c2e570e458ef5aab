"""The gateways that are measured, ours and its peers: each a process tree on a core of its own."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ops.bench.gateway_backend import MODEL

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "service/longleaf/embedded/models/tiny-target"
BACKEND_PORTS = (9481, 9482)
PORT = 9490
METRICS_PORT = 9491
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_URLS = [f"http://127.0.0.1:{port}" for port in BACKEND_PORTS]


@dataclass(frozen=True, slots=True)
class Target:
    """One gateway. ``venv``: the folder whose Python runs it, beside the repository's files."""

    name: str
    venv: str
    command: Sequence[str]
    environment: Mapping[str, str]

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here."""
        if (ROOT / self.venv / "bin/python").exists():
            return None
        return f"{self.name} is not installed in {self.venv}: make bench-gateway does that"


def targets(folder: Path, key: str) -> dict[str, Target]:
    """All gateways by name; their files go to ``folder``, clients send ``key``."""
    keys = folder / "keys"
    keys.write_text(key + "\n")
    own = [
        *("-m", "longleaf", "gateway", "--port", str(PORT), "--metrics-port", str(METRICS_PORT)),
        *(part for url in _URLS for part in ("--replica", url)),
        *("--api-key-file", str(keys), "--tokenizer", str(TOKENIZER)),
        *("--queue-timeout", "120"),
    ]
    peers = ["--host", "127.0.0.1", "--port", str(PORT), "--prometheus-port", str(METRICS_PORT)]
    usual = ["--worker-urls", *_URLS, "--policy", "round_robin", "--log-level", "warn", *peers]
    config = folder / "litellm.json"  # JSON is YAML too
    config.write_text(json.dumps(_litellm(key)))
    quiet = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    litellm = ["--config", str(config), "--host", "127.0.0.1", "--port", str(PORT)]
    return {
        "longleaf": Target("longleaf", ".venv", own, {}),
        "sglang-router": Target(
            "sglang-router", ".venv-peers", ["-m", "sglang_router.launch_router", *usual], {}
        ),
        "smg": Target("smg", ".venv-peers", [_script(".venv-peers", "smg"), "launch", *usual], {}),
        "litellm": Target(
            "litellm",
            ".venv-litellm",
            [_script(".venv-litellm", "litellm"), *litellm, "--num_workers", "1"],
            quiet,
        ),
    }


@contextmanager
def running(target: Target, folder: Path, core: int) -> Iterator[int]:
    """Start it; the id of its process. Its output goes to ``folder``."""
    python = ROOT / target.venv / "bin/python"
    environment = {**os.environ, **target.environment, "NO_PROXY": "*"}
    command = [str(python), *target.command]
    with _child(command, folder / f"{target.name}.log", core, environment) as process:
        yield process.pid


@contextmanager
def running_backend(folder: Path, core: int) -> Iterator[int]:
    """The replicas that every gateway stands before."""
    ports = [str(port) for port in BACKEND_PORTS]
    command = [sys.executable, "-m", "ops.bench.gateway_backend", *ports]
    with _child(command, folder / "backend.log", core, dict(os.environ)) as process:
        yield process.pid


@contextmanager
def _child(
    command: Sequence[str], log: Path, core: int, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    pinned = ["taskset", "-c", str(core), *command]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            pinned, stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            for pid in [process.pid, *_descendants(process.pid)]:
                _signal(pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                for pid in [process.pid, *_descendants(process.pid)]:
                    _signal(pid, signal.SIGKILL)


@contextmanager
def probing_livez(port: int, core: int) -> Iterator[list[float]]:
    """Asks ``/livez`` all the time; the milliseconds of each answer are there after the block."""
    command = [sys.executable, "-m", "ops.bench.gateway_livez", str(port)]
    told: list[float] = []
    with subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as process:
        yield told
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError("the gateway did not answer /livez")
    told += [float(line) for line in output.split()]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process tree, ended children included."""
    total = 0
    for one in [pid, *_descendants(pid)]:
        fields = _stat(one)
        if fields:
            total += sum(int(value) for value in fields[11:15])
    return total / _TICKS


def resident_bytes(pid: int) -> int:
    """Resident memory of a process tree."""
    total = 0
    for one in [pid, *_descendants(pid)]:
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE
        except OSError:
            continue
    return total


def new_key() -> str:
    """A key that only this run's gateways accept."""
    return "sk-" + secrets.token_hex(8)


def _litellm(key: str) -> Mapping[str, object]:
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "x"},
        }
        for url in _URLS
    ]
    return {
        "model_list": models,
        "general_settings": {"master_key": key},
        "router_settings": {"routing_strategy": "simple-shuffle"},
        "litellm_settings": {"telemetry": False, "set_verbose": False},
    }


def _script(venv: str, name: str) -> str:
    return str(ROOT / venv / "bin" / name)


def _descendants(pid: int) -> list[int]:
    found = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
            for thread in threads:
                children = [int(child) for child in (thread / "children").read_text().split()]
                found += children
                waiting += children
        except OSError:
            continue
    return found


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
