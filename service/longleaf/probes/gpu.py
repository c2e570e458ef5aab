"""``longleaf probe gpu``: what bounds idle, prefill and decode: compute, memory or latency."""

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import aiohttp

from longleaf.probes.chart import bars
from longleaf.probes.client import ProbeError, Server, complete, find_server
from longleaf.probes.progress import Progress
from longleaf.probes.report import document
from longleaf.probes.texts import TEXTS

PHASES = ("idle", "prefill", "decode")
FIGURES = ("tensor_active_ratio", "dram_active_ratio", "sm_resident_ratio", "power_watts")
_BUSY = 0.5
_WORKS = 0.15
"""As of the alert LongleafGpuResidentButIdle."""
_RESIDENT = 0.5
_LINE = re.compile(r'^longleaf_gpu_([a-z_]+)\{gpu="([^"]*)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """``exporter``: /metrics of the GPU exporter. ``seconds``: of idling, and of each phase at
    least. ``settle``: samples of a phase's first seconds, which the one before colours, are left
    out.
    """

    url: str
    exporter: str
    context: int
    seconds: float = 10.0
    settle: float = 1.0
    interval: float = 0.5
    max_tokens: int = 256
    timeout: float = 1800.0


@dataclass(slots=True)
class Phase:
    """Samples of one phase: by metric, the mean over the GPUs each time."""

    name: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    def mean(self, metric: str) -> float | None:
        """Mean over the phase; None where the exporter does not tell it."""
        values = self.samples.get(metric)
        return fmean(values) if values else None

    @property
    def bound(self) -> str:
        """One of compute, memory, compute and memory, mixed, latency, idle, unknown."""
        tensor, dram = self.mean("tensor_active_ratio"), self.mean("dram_active_ratio")
        resident = self.mean("sm_resident_ratio")
        if tensor is not None and dram is not None and min(tensor, dram) >= _BUSY:
            return "compute and memory"
        if tensor is not None and tensor >= _BUSY:
            return "compute"
        if dram is not None and dram >= _BUSY:
            return "memory"
        if tensor is None or dram is None or resident is None:
            return "unknown"
        if max(tensor, dram) >= _WORKS:
            return "mixed"
        return "latency" if resident >= _RESIDENT else "idle"

    def words(self) -> str:
        """The phase in a sentence."""
        figures = []
        for metric, name, scale, unit in (
            ("tensor_active_ratio", "tensor pipes", 100, " %"),
            ("dram_active_ratio", "memory", 100, " %"),
            ("sm_resident_ratio", "resident", 100, " %"),
            ("power_watts", "power", 1, " W"),
        ):
            value = self.mean(metric)
            figures.append(f"{name} {'unknown' if value is None else f'{value * scale:.1f}{unit}'}")
        return f"{self.name}: {_MEANING[self.bound]} ({', '.join(figures)})."


_MEANING: Mapping[str, str] = {
    "compute": "compute-bound, the tensor pipes work",
    "memory": "memory-bound, device memory is busy",
    "compute and memory": "compute- and memory-bound at once",
    "mixed": "bound by no one thing, tensor pipes or memory work for a part of the time",
    "latency": "latency-bound, kernels are there and neither tensor pipes nor memory work: too few "
    "blocks, launches, or waiting for other GPUs",
    "idle": "idle, no kernel is there most of the time",
    "unknown": "cannot be told, for the exporter lacks figures",
}


@dataclass(slots=True)
class GpuRun:
    """What was measured so far."""

    plan: GpuPlan
    phases: list[Phase] = field(default_factory=list)
    partial: bool = True

    def phase(self, name: str) -> Phase | None:
        """A phase that was measured."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def faults(self) -> list[str]:
        """What fails the probe, in words."""
        found = []
        for name in ("prefill", "decode"):
            phase = self.phase(name)
            if phase is not None and phase.bound in {"latency", "unknown"}:
                found.append(f"{name} is {phase.bound}{'-bound' * (phase.bound == 'latency')}")
        idle = self.phase("idle")
        if idle is not None and idle.bound not in {"idle", "unknown"}:
            found.append("the GPUs were not idle before: somebody else uses them")
        return found

    def words(self) -> str:
        """The answer."""
        faults = "; ".join(self.faults())
        return " ".join(phase.words() for phase in self.phases) + (f" {faults}." * bool(faults))

    def table(self) -> list[list[str]]:
        """Rows of text: a phase each."""
        rows = [["phase", "bound by", "tensor", "memory", "resident", "power W", "n"]]
        for phase in self.phases:
            means = [phase.mean(metric) for metric in FIGURES]
            figures = ["absent" if value is None else f"{value:.3f}" for value in means]
            count = max((len(values) for values in phase.samples.values()), default=0)
            rows.append([phase.name, phase.bound, *figures, str(count)])
        return rows

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return document(
            "gpu",
            self.plan.url,
            partial=self.partial,
            passed=not self.partial and not self.faults(),
            faults=self.faults(),
            words=self.words(),
            phases=[
                {
                    **asdict(phase),
                    "bound": phase.bound,
                    "means": {metric: phase.mean(metric) for metric in phase.samples},
                }
                for phase in self.phases
            ],
        )

    def page(self) -> str:
        """The HTML page."""
        groups = {
            phase.name: {
                metric: value for metric in FIGURES[:3] if (value := phase.mean(metric)) is not None
            }
            for phase in self.phases
        }
        return bars("What bounds the GPUs", self.words(), groups, self.table())


async def measure(run: GpuRun, progress: Progress) -> None:
    """Fill ``run`` phase by phase. What is there when it is cancelled stays."""
    plan = run.plan
    progress.expect(len(PHASES))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=plan.timeout)) as http:
        server = await find_server(http, plan.url)
        await _figures(http, plan.exporter)
        await _phase(run, http, "idle", asyncio.sleep(plan.seconds + plan.settle))
        progress.step(run.phases[-1].words())
        await _phase(run, http, "prefill", _prefill(plan, http, server))
        progress.step(run.phases[-1].words())
        ready = asyncio.Event()
        await _phase(run, http, "decode", _decode(plan, http, server, ready), ready)
        progress.step(run.phases[-1].words())
    run.partial = False


async def _prefill(plan: GpuPlan, http: aiohttp.ClientSession, server: Server) -> None:
    """Long prompts one after the other, none of which begins like another."""
    until = asyncio.get_running_loop().time() + plan.seconds + plan.settle
    seed = 0
    while seed == 0 or asyncio.get_running_loop().time() < until:
        text = f"{seed}. " + TEXTS["prose"](plan.context * 3, seed)
        await complete(http, server, text, max_tokens=1)
        seed += 1


async def _decode(
    plan: GpuPlan, http: aiohttp.ClientSession, server: Server, ready: asyncio.Event
) -> None:
    """One prompt, cached by the first answer, continued again and again."""
    text = TEXTS["prose"](plan.context * 3, 10_000)
    await complete(http, server, text, max_tokens=1)
    ready.set()
    until = asyncio.get_running_loop().time() + plan.seconds + plan.settle
    while True:
        await complete(http, server, text, max_tokens=plan.max_tokens)
        if asyncio.get_running_loop().time() >= until:
            return


async def _phase(
    run: GpuRun,
    http: aiohttp.ClientSession,
    name: str,
    work: Awaitable[None],
    ready: asyncio.Event | None = None,
) -> None:
    """Sample while ``work`` goes on, from ``ready`` and the settling time on."""
    plan, phase = run.plan, Phase(name)
    run.phases.append(phase)
    task = asyncio.ensure_future(work)
    try:
        if ready is not None:
            waiting = asyncio.ensure_future(ready.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await asyncio.wait({task}, timeout=plan.settle)
        while not task.done():
            for metric, values in (await _figures(http, plan.exporter)).items():
                phase.samples.setdefault(metric, []).append(fmean(values))
            await asyncio.wait({task}, timeout=plan.interval)
        await task
    finally:
        task.cancel()


async def _figures(http: aiohttp.ClientSession, url: str) -> Mapping[str, Sequence[float]]:
    """Values of each metric, one for each GPU."""
    try:
        async with http.get(url) as answer:
            text = await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProbeError(f"{url}: {type(error).__name__}: {error}") from error
    found: dict[str, list[float]] = {}
    for metric, _, value in _LINE.findall(text):
        found.setdefault(metric, []).append(float(value))
    if not found:
        raise ProbeError(f"{url} has no longleaf_gpu_ metrics: is it a GPU exporter?")
    return found
