"""Put the service under load: to saturation, beyond capacity, for long, and beside another client.

Run as ``python -m ops.bench.load``; prints a table and writes ops/results/load-<part>.json for each
part, and the reports of the runs to build/load. The embedded engine is real; replicas with 185k
prompts are simulated from the recorded curve of an H200, at a speed that lets this machine keep up.
Times of simulated fleets are given in the curve's seconds.
"""

import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from longleaf.metrics import context_bucket
from longleaf_load.records import Record, read_records
from longleaf_load.slo import parse_slo
from ops.bench.gateway_peers import ROOT, TOKENIZER, cpu_seconds, resident_bytes
from ops.bench.leftovers import unwind_on_sigterm
from ops.bench.load_fleets import FLEETS, capacity, steady_work
from ops.bench.load_stack import GATEWAY_URL, Stack, core_apart, load, record_curve, running
from ops.bench.results import RESULTS_DIR, Row, format_table, write_results

PLANS = ROOT / "loadtest" / "plans"
AIPERF = ROOT / ".venv-clients" / "bin" / "aiperf"
_QUEUE_PER_REPLICA = 10
_SLO_SECONDS, _SLO_SECONDS_PER_1K, _SLO_TPOT = 60.0, 0.25, 0.5
_EMBEDDED = ("embedded", "--served-model-name", "tiny")
_EMBEDDED_SLO = ("ttft_ms=5000", "tpot_ms=250")
_MEASURES: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
}
_SOAK_SPEED = 40.0
_SOAK_SECONDS = 90.0
"""An hour at that speed."""
_POLL_SECONDS = 1.0
_IDLE_SECONDS = 12.0
_AIPERF_REQUESTS = 40


class Bench:
    """One run; ``rows`` grows. Logs go to ``folder``, reports to ``out``; what is compared is
    measured in ``rounds``, at least two.
    """

    def __init__(self, folder: Path, out: Path, rounds: int) -> None:
        self._folder = folder
        self._out = out
        self._rounds = rounds
        self.rows: list[Row] = []

    def validate(self) -> None:
        """The real engine and its simulation under one load, in rounds, so that whatever else this
        machine does weighs on both alike. The curve is recorded just before the real run, which so
        finds an engine that has been in use: pages of a pool that nothing was written to yet cost
        a tenth of a prefill. The engine has a core of its own: one whose forwards wait for the
        clients and the gateway is slower by what these do, which a curve cannot know.
        """
        real: list[Record] = []
        simulated: list[Record] = []
        for number in range(self._rounds):
            seed = ("--plan-seed", str(number + 1))
            with core_apart() as cores:
                with running(self._folder, _EMBEDDED, 1, cores=cores):
                    curve, commits = record_curve(
                        self._out, "embedded", "128,512,1k,2k,4k", "1,2,4", "uniform 32 96", *seed
                    )
                    real += self._records("validate", f"real-{number + 1}", *seed)
                engine = ("simulate", "--curve", str(curve), "--commit-len", str(commits))
                limits = ("--chunked-prefill-size", "512", "--context-length", "16384")
                pool = ("--max-total-tokens", "40960", "--interleave-prefill")
                with running(self._folder, (*engine, *limits, *pool), 1, cores=cores):
                    simulated += self._records("validate", f"simulated-{number + 1}", *seed)
        self._validation(real, simulated)

    def _records(self, plan: str, name: str, *arguments: str) -> list[Record]:
        """Those of a run that were served."""
        self._load(plan, name, *arguments)
        every = read_records(self._out / name / "records.jsonl")
        return [record for record in every if record.outcome == "ok"]

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

    def _validation(self, real: Sequence[Record], simulated: Sequence[Record]) -> None:
        """Medians of all requests, and the worst context."""
        for name, of in _MEASURES.items():
            medians = [_median_ms(map(of, records)) for records in (real, simulated)]
            self._add(
                f"simulated_{name}_off_real",
                abs(medians[1] / medians[0] - 1),
                "share", "lower", 0.15, n=len(real),
            )  # fmt: skip
            self._add(f"validate_real_{name}_ms", medians[0], "ms", "lower", n=len(real))
            self._add(f"validate_simulated_{name}_ms", medians[1], "ms", "lower", n=len(simulated))
            worst = 0.0
            for bucket in {context_bucket(record.prompt_tokens) for record in real}:
                own, other = (
                    _median_ms(
                        of(one) for one in records if context_bucket(one.prompt_tokens) == bucket
                    )
                    for records in (real, simulated)
                )
                worst = max(worst, abs(other / own - 1))
            self._add(f"simulated_{name}_off_real_worst_context", worst, "share", "lower")
        steps = [
            sum((one.completion_tokens or 1) - 1 for one in records)
            / sum(one.steps or 0 for one in records)
            for records in (real, simulated)
        ]
        self._add("validate_real_commit_len", steps[0], "tokens/step", n=len(real))
        self._add("validate_simulated_commit_len", steps[1], "tokens/step", n=len(simulated))

    def gateway_cpu(self) -> None:
        """The same requests before 1, 8 and 64 replicas that are not busy: what one costs the
        gateway beyond what it does at rest, which is to ask each replica how it is.

        Rest is measured after the requests, when all is warm; in rounds, since what else this
        machine does makes the same work dearer.
        """
        each: dict[int, list[float]] = {replicas: [] for replicas in FLEETS}
        idle: dict[int, list[float]] = {replicas: [] for replicas in FLEETS}
        requests = 0
        for _ in range(self._rounds):
            for replicas in FLEETS:
                engine = ("simulate", "--replicas", str(replicas), "--speed", "16")
                with running(self._folder, engine, replicas) as stack:
                    before, begin = cpu_seconds(stack.gateway), time.monotonic()
                    report = self._load("cpu", f"cpu_{replicas}")
                    spent = cpu_seconds(stack.gateway) - before
                    took = time.monotonic() - begin
                    rest = _cpu_per_second(stack.gateway, _IDLE_SECONDS)
                requests = report["outcomes"]["ok"]
                each[replicas].append((spent - rest * took) / requests * 1e3)
                idle[replicas].append(rest * 1e3)
        for replicas in FLEETS:
            self._median(f"gateway_cpu_{replicas}_replicas", each[replicas], "ms/request")
            self._median(f"gateway_idle_cpu_{replicas}_replicas", idle[replicas], "ms/s")
        self._add("gateway_cpu_requests", requests, "requests", n=self._rounds)
        ratio = statistics.median(each[64]) / statistics.median(each[1])
        self._add("gateway_cpu_64_vs_1", ratio, "ratio", "lower", 1.2, n=self._rounds)

    def fleet(self, replicas: int, factor: float) -> None:
        """Simulated replicas from half to twice their capacity; ``factor``: on their speed."""
        speed, longer = FLEETS[replicas]
        speed *= factor
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
            report = self._load(
                "capacity", name, "--rate", str(rate), "--longer", str(longer), *slo
            )
            spent = cpu_seconds(stack.gateway) - before
            lost = stack.lost_seconds()
        phases = {one["name"]: one for one in report["phases"]}
        objective = parse_slo(slo[1:])
        work = steady_work(
            read_records(self._out / name / "records.jsonl"),
            objective,
            [one["seconds"] for one in phases.values()],
        )
        n = phases["2x"]["requests"]
        self._add(f"{name}_goodput_2x_vs_1x", work[2] / work[1], "ratio", "higher", 0.9, n=n)
        most, twice = (phases[one]["goodput_per_second"] for one in ("1x", "2x"))
        self._add(f"{name}_goodput_requests_2x_vs_1x", twice / most, "ratio", "higher", n=n)
        for label, done, one in zip(phases, work, phases.values(), strict=True):
            busy = done / (one["seconds"] / 2) / speed / replicas
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

    def _median(self, name: str, values: Sequence[float], unit: str) -> None:
        low, middle, high = (
            round(one, 4) for one in statistics.quantiles(values, n=4, method="inclusive")
        )
        spread = (low, high)
        self.rows.append(Row(name, middle, unit, better="lower", n=len(values), spread=spread))

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


def _median_ms(seconds: Iterable[float | None]) -> float:
    return statistics.median(one * 1e3 for one in seconds if one is not None)


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


_FLEETS = {f"fleet_{replicas}": replicas for replicas in FLEETS}
_PARTS = (*_FLEETS, "gateway_cpu", "soak", "aiperf", "saturate", "validate")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "build" / "load")
@click.option("--part", "parts", multiple=True, type=click.Choice(_PARTS), default=_PARTS)
@click.option("--rounds", default=3, type=click.IntRange(2), help="Of what is compared.")
@click.option("--speed-factor", default=1.0, help="On the speed of the simulated fleets.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS_DIR)
def main(
    out: Path,
    parts: tuple[str, ...],
    rounds: int,
    speed_factor: float,
    results: Path,
) -> None:
    """Run the load benchmark; an hour and a half on two cores."""
    unwind_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longleaf-load-") as folder:
        bench = Bench(Path(folder), out, rounds)
        work: dict[str, Callable[[], None]] = {
            "validate": bench.validate,
            "saturate": bench.saturate,
            **{
                part: partial(bench.fleet, replicas, speed_factor)
                for part, replicas in _FLEETS.items()
            },
            "gateway_cpu": bench.gateway_cpu,
            "soak": lambda: bench.soak(_SOAK_SECONDS),
            "aiperf": bench.aiperf,
        }
        for part in parts:
            before = len(bench.rows)
            work[part]()
            slug = part.replace("_", "-")
            path = write_results(
                "load",
                f'make bench-load BENCH_ARGS="--part {part} --rounds {rounds}"',
                bench.rows[before:],
                slug=slug,
                directory=results,
            )
            click.echo(f"{path}, after {time.monotonic() - begin:.0f} s", err=True)
    click.echo(format_table(bench.rows))


if __name__ == "__main__":
    main()
