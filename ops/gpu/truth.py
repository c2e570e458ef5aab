"""Does the GPU exporter tell the truth? It runs beside loads whose figures are known.

``python -m ops.gpu.truth --out DIR``: a recording of each load by ``longleaf exporter gpu``, and
what sampling costs the load, in ``DIR/gpu-truth.json``.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from longleaf.exporters.cupti import CuptiPm
from longleaf.exporters.source import LEAST_INTERVAL
from ops.gpu.known_loads import Load, known_loads

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 15.0
_TENSOR = "longleaf_gpu_tensor_active_ratio{"
PARTS = ("loads", "often", "cupti")
_OFTEN = ("copy", "sglang-verify-64k", "longleaf-verify-64k")
_BY_CUPTI = ("matmul", "copy", "sglang-verify-64k", "longleaf-verify-64k")


@dataclass(frozen=True)
class Seconds:
    """How long each part of an observation lasts."""

    settle: float = 0.7
    alone: float = 0.8
    watched: float = 4.0


class Driver(threading.Thread):
    """Does a load until it is told to stop; remembers when each chunk ended."""

    def __init__(self, load: Load) -> None:
        super().__init__(daemon=True)
        self._load = load
        self._ends: list[float] = []
        self._stop_asked = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Called by the thread."""
        try:
            # A thread has no CUDA context of its own, and cuBLAS warns where it must make one.
            torch.cuda.set_device(torch.cuda.current_device())
            while not self._stop_asked.is_set():
                self._load.chunk()
                self._ends.append(time.perf_counter())
        except BaseException as error:
            self.error = error

    def rate(self, begin: float, end: float) -> float:
        """Work a second between two moments of ``time.perf_counter``."""
        if self.error is not None:
            raise self.error
        inside = [moment for moment in list(self._ends) if begin <= moment <= end]
        if len(inside) < 2:
            return 0.0
        return self._load.work * (len(inside) - 1) / (inside[-1] - inside[0])

    def finish(self) -> None:
        """Stop, and wait for the end."""
        self._stop_asked.set()
        self.join()


class Exporter:
    """``longleaf exporter gpu`` as a process of its own, recording."""

    def __init__(self, recording: Path, interval: float, note: str, log: Path, *more: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        command = [
            *(sys.executable, "-m", "longleaf", "exporter", "gpu", "--port", port),
            *("--interval", str(interval), "--record", str(recording), "--note", note, *more),
        ]
        with log.open("a") as errors:
            print(*command, file=errors, flush=True)
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().strip()
        if not self._url:
            raise RuntimeError(f"the exporter ended: {log.read_text()[-500:]}")

    def scrape(self) -> str:
        """Return its exposition once it has published a sample."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with urllib.request.urlopen(self._url, timeout=_START_SECONDS) as answer:
                text: str = answer.read().decode()
            if "\nlongleaf_gpu_sample_seconds 0.0\n" not in text:
                return text
            if time.monotonic() > deadline:
                raise RuntimeError("the exporter publishes no sample")
            time.sleep(0.05)

    def cpu_seconds(self) -> float:
        """Processor time that it has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def finish(self) -> None:
        """Let it write its recording, and end."""
        self._process.send_signal(signal.SIGINT)
        try:
            # Reads what is left and closes the pipe.
            self._process.communicate(timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def observe(
    load: Load, recording: Path, seconds: Seconds, interval: float, *more: str
) -> dict[str, Any]:
    """Run a load alone, watched by the exporter, which writes ``recording``, and alone again."""
    driver = Driver(load)
    driver.start()
    exporter = None
    try:
        time.sleep(seconds.settle)
        begin = time.perf_counter()
        time.sleep(seconds.alone)
        end = time.perf_counter()
        alone = driver.rate(begin, end)
        log = recording.with_name("exporter.log")
        exporter = Exporter(recording, interval, load.note, log, *more)
        exporter.scrape()
        used, begin = exporter.cpu_seconds(), time.perf_counter()
        time.sleep(seconds.watched)
        end = time.perf_counter()
        cpu = (exporter.cpu_seconds() - used) / (end - begin)
        text = exporter.scrape()
        exporter.finish()
        exporter = None
        again = time.perf_counter()
        time.sleep(seconds.alone)
        after = driver.rate(again, time.perf_counter())
    finally:
        driver.finish()
        if exporter is not None:
            exporter.finish()
    return {
        "load": load.name,
        "note": load.note,
        "recording": recording.name,
        "interval": interval,
        "unit": f"{load.unit}/s",
        "alone": [alone, after],
        "watched": driver.rate(begin, end),
        "cpu_share": cpu,
        "exposition": [line for line in text.splitlines() if line.startswith("longleaf_gpu_")],
    }


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--sglang", envvar="SGLANG_SRC", help="Directory with the package sglang.")
@click.option("--interval", default=0.25, show_default=True, help="Seconds between samples.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="[default: all]")
@click.option("--watched", default=Seconds.watched, show_default=True, help="Seconds a recording.")
def main(
    out: Path, sglang: str | None, interval: float, parts: tuple[str, ...], watched: float
) -> None:
    """Record each load, some also as often as the exporter allows, some by CUPTI alone."""
    from kernel_bench.machine import describe_gpu

    parts = parts or PARTS
    out.mkdir(parents=True, exist_ok=True)
    seconds = Seconds(watched=watched)
    short = Seconds(settle=0.3, alone=1.0, watched=1.5)
    document: dict[str, Any] = {"gpu": asdict(describe_gpu()), "observed": [], "failed": []}

    def observed(load: Load, name: str, seconds: Seconds, interval: float, *more: str) -> bool:
        try:
            found = observe(load, out / f"{name}.json", seconds, interval, *more)
        except Exception as error:
            traceback.print_exc()
            document["failed"].append({"load": name, "why": f"{type(error).__name__}: {error}"})
            return False
        document["observed"].append(found)
        alone = ", ".join(f"{rate:.5g}" for rate in found["alone"])
        print(f"{name}: alone {alone}, watched {found['watched']:.5g}", flush=True)
        print(*found["exposition"], sep="\n", flush=True)
        (out / "gpu-truth.json").write_text(json.dumps(document, indent=1) + "\n")
        return any(_TENSOR in line for line in found["exposition"])

    loads = []
    for load in known_loads(sglang):
        loads.append(load)
        if "loads" in parts:
            observed(load, load.name, seconds, interval)
        if "often" in parts and load.name in _OFTEN:
            observed(load, f"{load.name}-often", short, LEAST_INTERVAL)
    for load in loads:
        wanted = "cupti" in parts and load.name in _BY_CUPTI
        if wanted and not observed(
            load, f"{load.name}-cupti", short, interval, "--source", CuptiPm.name
        ):
            break
    if document["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
