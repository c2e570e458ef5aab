"""Put the service under load: to saturation, beyond capacity, for long, and beside another client.

Run as ``python -m ops.bench.load``; prints a table and writes ops/results/load.json, and the
reports of the runs to build/load. The embedded engine is real; replicas with 185k prompts are
simulated from the recorded curve of an H200, at a speed that lets this machine keep up. Times of
simulated fleets are given in the curve's seconds.
"""

import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from longleaf.capacity.model import Model
from longleaf.capacity.traffic import normalized, parse_kind
from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import load_curve
from longleaf_load.records import read_records
from longleaf_load.slo import Slo, parse_slo
from ops.bench.gateway_peers import ROOT, TOKENIZER, cpu_seconds, resident_bytes
from ops.bench.load_stack import GATEWAY_URL, Stack, load, record_curve, running
from ops.bench.results import RESULTS_DIR, Row, format_table, write_results

PLANS = ROOT / "loadtest" / "plans"
AIPERF = ROOT / ".venv-clients" / "bin" / "aiperf"
FLEETS = {1: 8.0, 8: 2.0, 64: 0.5}
"""Replicas, and the speed at which they are simulated."""
_QUEUE_PER_REPLICA = 10
_SLO_SECONDS, _SLO_SECONDS_PER_1K, _SLO_TPOT = 60.0, 0.25, 0.5
_MIX = ((0.5, "2k"), (0.3, "16k"), (0.14, "64k"), (0.06, "185k"))
_SEQUENCES, _POOL = 8, 218_000
_EMBEDDED = ("embedded", "--served-model-name", "tiny")
_EMBEDDED_SLO = ("ttft_ms=5000", "tpot_ms=250")
_SOAK_SPEED = 40.0
_SOAK_SECONDS = 90.0
"""An hour at that speed."""
_POLL_SECONDS = 1.0
_IDLE_SECONDS = 6.0
_AIPERF_REQUESTS = 40


def capacity() -> float:
    """Requests a second of the plan ``capacity`` that one replica serves, by the formulas."""
    words = [f"{share}:{length}:200:{text}" for share, length in _MIX for text in
             ("predictable", "code", "prose")]  # fmt: skip
    kinds = normalized([parse_kind(word) for word in words])
    model = Model(load_curve("h200-ddtree"), load_commits(), kinds, _POOL, _SEQUENCES)
    return model.most_per_replica


class Bench:
    """One run; ``rows`` grows. Logs go to ``folder``, reports to ``out``."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._folder = folder
        self._out = out
        self.rows: list[Row] = []

    def validate(self) -> None:
        """The real engine and its simulation, by a curve recorded just before, under one load."""
        with running(self._folder, _EMBEDDED, 1):
            curve, commits = record_curve(self._out, "embedded", "128,1k,4k", "1,2,4")
            real = self._load("validate", "real")
        engine = ("simulate", "--curve", str(curve), "--commit-len", str(commits))
        limits = ("--chunked-prefill-size", "512", "--context-length", "16384")
        pool = ("--max-total-tokens", "40960", "--interleave-prefill")
        with running(self._folder, (*engine, *limits, *pool), 1):
            simulated = self._load("validate", "simulated")
        self._validation(real, simulated)

    def saturate(self) -> None:
        """The real engine in steps, until less than half of the requests meet the objective."""
        options = ("--queue-size", "16", "--queue-timeout", "20")
        with running(self._folder, _EMBEDDED, 1, options):
            self._saturation(self._load("saturate", "saturate", *_slo(*_EMBEDDED_SLO)))

    def _saturation(self, report: Mapping[str, Any]) -> None:
        phases = [one for one in report["phases"] if one["requests"]]
        best = max(one["goodput_per_second"] for one in phases)
        self._add("embedded_goodput_per_s", best, "requests/s", n=len(phases))
        first = phases[0]
        for name, unit in (("ttft_ms", "ms"), ("tpot_ms", "ms")):
            self._add(
                f"embedded_{name}_p50_unloaded",
                first[name]["p50"],
                unit,
                "lower",
                n=first["served"],
            )
        self._add("embedded_offered_at_end_per_s", phases[-1]["offered_per_second"], "requests/s")
        self._add(
            "embedded_failed", float(report["outcomes"].get("failed", 0)), "requests", "lower", 0.0
        )
        self._refusals("embedded", report)

    def _validation(self, real: Mapping[str, Any], simulated: Mapping[str, Any]) -> None:
        """Medians of all requests, and the worst context."""
        for name in ("ttft", "tpot"):
            column = {"ttft": 1, "tpot": 2}[name]
            medians = [
                statistics.median(p[column] for p in report["points"] if p[column] is not None)
                for report in (real, simulated)
            ]
            away = abs(medians[1] / medians[0] - 1)
            self._add(
                f"simulated_{name}_off_real", away, "share", "lower", 0.15, n=real["requests"]
            )
            self._add(f"validate_real_{name}_ms", medians[0], "ms", "lower")
            self._add(f"validate_simulated_{name}_ms", medians[1], "ms", "lower")
            worst = max(
                abs(
                    simulated["contexts"][bucket][f"{name}_ms"]["p50"] / one[f"{name}_ms"]["p50"]
                    - 1
                )
                for bucket, one in real["contexts"].items()
                if one["served"] and simulated["contexts"].get(bucket, {}).get("served")
            )
            self._add(f"simulated_{name}_off_real_worst_context", worst, "share", "lower")

    def fleets(self, sizes: Sequence[int], factor: float) -> None:
        """Simulated replicas from half to twice their capacity."""
        for replicas in sizes:
            self._fleet(replicas, FLEETS[replicas] * factor)

    def gateway_cpu(self) -> None:
        """The same requests before 1, 8 and 64 replicas that are not busy: what one costs the
        gateway beyond what it does at rest, which is to ask each replica how it is.
        """
        cpu: dict[int, float] = {}
        for replicas in FLEETS:
            engine = ("simulate", "--replicas", str(replicas), "--speed", "16")
            with running(self._folder, engine, replicas) as stack:
                idle = _cpu_per_second(stack.gateway, _IDLE_SECONDS)
                before, begin = cpu_seconds(stack.gateway), time.monotonic()
                report = self._load("cpu", f"cpu_{replicas}")
                spent = cpu_seconds(stack.gateway) - before
                rest = idle * (time.monotonic() - begin)
            cpu[replicas] = float((spent - rest) / report["requests"] * 1e3)
            n = report["requests"]
            self._add(f"gateway_cpu_{replicas}_replicas", cpu[replicas], "ms/request", "lower", n=n)
            self._add(f"gateway_idle_cpu_{replicas}_replicas", idle * 1e3, "ms/s", "lower")
        self._add("gateway_cpu_64_vs_1", cpu[64] / cpu[1], "ratio", "lower", 1.2)

    def _fleet(self, replicas: int, speed: float) -> None:
        rate = capacity() * replicas * speed
        queue = ("--queue-size", str(_QUEUE_PER_REPLICA * replicas), "--queue-timeout", "120")
        engine = ("simulate", "--replicas", str(replicas), "--speed", str(speed))
        slo = _slo(
            f"ttft_ms={1e3 * _SLO_SECONDS / speed}",
            f"ttft_ms_per_1k={1e3 * _SLO_SECONDS_PER_1K / speed}",
            f"tpot_ms={1e3 * _SLO_TPOT / speed}",
        )
        name = f"simulated_{replicas}"
        with running(self._folder, engine, replicas, queue) as stack:
            before = cpu_seconds(stack.gateway)
            report = self._load("capacity", name, "--rate", str(rate), *slo)
            spent = cpu_seconds(stack.gateway) - before
            lost = stack.lost_seconds()
        phases = {one["name"]: one for one in report["phases"]}
        objective = parse_slo(slo[1:])
        work = _work(self._out / name / "records.jsonl", objective, len(phases))
        n = phases["2x"]["requests"]
        self._add(f"{name}_goodput_2x_vs_1x", work[2] / work[1], "ratio", "higher", 0.9, n=n)
        most, twice = (phases[one]["goodput_per_second"] for one in ("1x", "2x"))
        self._add(f"{name}_goodput_requests_2x_vs_1x", twice / most, "ratio", "higher", n=n)
        for label, done, one in zip(phases, work, phases.values(), strict=True):
            busy = done / one["seconds"] / speed / replicas
            self._add(f"{name}_goodput_{label}_of_capacity", busy, "share")
        for label, one in phases.items():
            self._add(
                f"{name}_offered_{label}_per_s", one["offered_per_second"] / speed, "requests/s"
            )
            self._add(
                f"{name}_goodput_{label}_per_s", one["goodput_per_second"] / speed, "requests/s"
            )
            if one["ttft_ms"]:
                self._add(
                    f"{name}_ttft_{label}_p50_s", one["ttft_ms"]["p50"] * speed / 1e3, "s", "lower"
                )
        self._add(
            f"{name}_failed", float(report["outcomes"].get("failed", 0)), "requests", "lower", 0.0
        )
        self._refusals(name, report)
        self._add(f"{name}_behind_curve_s", lost, "s", "lower")
        self._add(f"{name}_sent_late_p99_ms", report["late_p99_seconds"] * 1e3, "ms", "lower")
        each = spent / report["requests"] * 1e3
        self._add(f"{name}_gateway_cpu_ms", each, "ms/request", "lower", n=report["requests"])

    def _refusals(self, name: str, report: Mapping[str, Any]) -> None:
        told = report["retry_after"]
        nameless = sum(count for why, count in report["refusals"].items() if why.isdecimal())
        self._add(f"{name}_refused", float(sum(report["refusals"].values())), "requests", "lower")
        self._add(f"{name}_refused_without_reason", float(nameless), "requests", "lower", 0.0)
        self._add(
            f"{name}_refused_without_retry_after", float(told["without"]), "requests", "lower", 0.0
        )
        self._add(
            f"{name}_retry_after_median_error", told["median_error"], "share", "lower", 0.3,
            n=told["checked"], why="nothing was refused",
        )  # fmt: skip

    def soak(self, seconds: float) -> None:
        """One simulated replica at three quarters of its capacity; the memory of both processes."""
        rate = 0.75 * capacity() * _SOAK_SPEED
        engine = ("simulate", "--speed", str(_SOAK_SPEED))
        with running(self._folder, engine, 1) as stack, _Memory(stack) as memory:
            report = self._load("soak", "soak", "--rate", str(rate))
        hour = seconds * _SOAK_SPEED
        self._add("soak_seconds", hour, "s", n=report["requests"])
        self._add(
            "soak_failed", float(report["outcomes"].get("failed", 0)), "requests", "lower", 0.0
        )
        for name, growth, end in memory.growth():
            self._add(f"soak_{name}_growth", growth, "share", "lower", 0.05)
            self._add(f"soak_{name}_rss_mb", end / 1e6, "MB", "lower")

    def aiperf(self) -> None:
        """The same load from another project's client."""
        if not AIPERF.exists():
            why = "aiperf is not installed: make test-clients does that"
            self.rows += [
                Row(f"aiperf_{name}_off", None, "share", 0.1, "lower", why=why)
                for name in ("ttft", "itl")
            ]
            return
        engine = ("simulate", "--answer-tokens", "64", "--text", "prose")
        with running(self._folder, engine, 1):
            ours = self._load("aiperf", "aiperf-ours")
            theirs = _run_aiperf(self._out / "aiperf")
        told = {
            "ttft": (
                ours["contexts"]["4k"]["ttft_ms"]["mean"],
                theirs["time_to_first_token"]["avg"],
            ),
            "itl": (
                ours["contexts"]["4k"]["tpot_ms"]["mean"],
                theirs["inter_token_latency"]["avg"],
            ),
        }
        for name, (own, other) in told.items():
            self._add(
                f"aiperf_{name}_off",
                abs(other / own - 1),
                "share",
                "lower",
                0.1,
                n=_AIPERF_REQUESTS,
            )
            self._add(f"aiperf_{name}_ms", other, "ms", "lower")
            self._add(f"ours_{name}_ms", own, "ms", "lower")

    def _load(self, plan: str, name: str, *arguments: str) -> dict[str, Any]:
        click.echo(f"== {name} ({plan})", err=True)
        return load(self._out / name, "--plan", str(PLANS / f"{plan}.toml"), *arguments)

    def _add(
        self,
        name: str,
        value: float | None,
        unit: str,
        better: Any = "higher",
        bar: float | None = None,
        n: int = 1,
        why: str | None = None,
    ) -> None:
        rounded = None if value is None else round(value, 4)
        self.rows.append(
            Row(name, rounded, unit, bar, better, n, why=why if value is None else None)
        )


class _Memory:
    """Reads the resident memory of engine and gateway while it is open."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._samples: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def growth(self) -> list[tuple[str, float, float]]:
        """By process: the last quarter's mean over the second one's, and the last one's bytes."""
        quarter = max(1, len(self._samples) // 4)
        found = []
        for place, name in enumerate(("engine", "gateway")):
            values = [sample[place] for sample in self._samples]
            warm, end = (
                statistics.fmean(part)
                for part in (values[quarter : 2 * quarter], values[-quarter:])
            )
            found.append((name, end / warm - 1, end))
        return found

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._samples.append(
                (resident_bytes(self._stack.engines), resident_bytes(self._stack.gateway))
            )


def _work(path: Path, slo: Slo, phases: int) -> list[float]:
    """By phase: what of a replica's time, in the curve's seconds, the requests took that met the
    objective. Requests differ a hundredfold: their number says little of what was served.
    """
    curve, done = load_curve("h200-ddtree"), [0.0] * phases
    for record in read_records(path):
        if slo.met_by(record):
            context = record.prompt_tokens + record.max_tokens // 2
            step = curve.step_seconds([context] * _SEQUENCES) / _SEQUENCES
            done[record.phase] += curve.prompt_seconds(record.prompt_tokens)
            done[record.phase] += (record.steps or 0) * step
    return done


def _cpu_per_second(pid: int, seconds: float) -> float:
    """CPU of a process tree that is left alone."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / seconds


def _slo(*items: str) -> tuple[str, ...]:
    return ("--slo", *items)


def _run_aiperf(folder: Path) -> dict[str, Any]:
    """Its report of requests one after the other, 2,048 tokens in and 64 out."""
    command = [str(AIPERF), "profile", "--model", "longleaf-simulated", "--url", GATEWAY_URL]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(TOKENIZER)]
    command += ["--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    command += ["--request-count", str(_AIPERF_REQUESTS), "--concurrency", "1", "--ui", "simple"]
    command += ["--synthetic-input-tokens-mean", "2048", "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", "64", "--extra-inputs", "ignore_eos:true"]
    command += ["--random-seed", "1", "--artifact-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (path,) = folder.rglob("profile_export_aiperf.json")
    measured: dict[str, Any] = json.loads(path.read_text())
    return measured


_PARTS = ("fleets", "gateway_cpu", "soak", "aiperf", "saturate", "validate")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "build" / "load")
@click.option("--part", "parts", multiple=True, type=click.Choice(_PARTS), default=_PARTS)
@click.option(
    "--replicas",
    multiple=True,
    type=click.Choice([str(n) for n in FLEETS]),
    default=[str(n) for n in FLEETS],
)
@click.option("--speed-factor", default=1.0, help="On the speed of the simulated fleets.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS_DIR)
def main(
    out: Path, parts: tuple[str, ...], replicas: tuple[str, ...], speed_factor: float, results: Path
) -> None:
    """Run the load benchmark; about 20 minutes on two cores."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longleaf-load-") as folder:
        bench = Bench(Path(folder), out)
        work: dict[str, Callable[[], None]] = {
            "validate": bench.validate,
            "saturate": bench.saturate,
            "fleets": lambda: bench.fleets([int(n) for n in replicas], speed_factor),
            "gateway_cpu": bench.gateway_cpu,
            "soak": lambda: bench.soak(_SOAK_SECONDS),
            "aiperf": bench.aiperf,
        }
        for part in parts:
            work[part]()
            path = write_results("load", "make bench-load", bench.rows, directory=results)
    click.echo(format_table(bench.rows))
    click.echo(f"{path}, after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
