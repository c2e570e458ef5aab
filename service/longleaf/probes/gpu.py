"""``longleaf probe gpu``: what bounds idle, prefill and decode: compute, memory or latency."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import aiohttp

from longleaf.probes.chart import bars
from longleaf.probes.client import ProbeError, Server, complete, find_server, session
from longleaf.probes.exposition import gpu_figures
from longleaf.probes.lengths import label
from longleaf.probes.progress import Progress
from longleaf.probes.report import document
from longleaf.probes.texts import TEXTS

PHASES = ("idle", "prefill", "decode")
FIGURES = ("tensor_active_ratio", "dram_active_ratio", "sm_resident_ratio", "power_watts")
_BUSY = 0.5
_WORKS = 0.15
"""As of the alert LongleafGpuResidentButIdle."""
_RESIDENT = 0.5
_USUAL = 16 << 10


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """``exporter``: /metrics of the GPU exporter. ``context``: None for 16k, or what the server
    takes. ``seconds``: of idling, and of each phase at least. ``settle``: samples of a phase's
    first seconds, which the one before colours, are left out.
    """

    url: str
    exporter: str
    context: int | None
    seconds: float = 10.0
    settle: float = 1.0
    interval: float = 0.5
    max_tokens: int = 256
    timeout: float = 1800.0
    api_key: str | None = None


@dataclass(slots=True)
class Gpu:
    """Samples of one GPU in one phase, by metric."""

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

    def figures(self) -> str:
        """The means in words."""
        told = []
        for metric, name, scale, unit in (
            ("tensor_active_ratio", "tensor pipes", 100, " %"),
            ("dram_active_ratio", "memory", 100, " %"),
            ("sm_resident_ratio", "resident", 100, " %"),
            ("power_watts", "power", 1, " W"),
        ):
            value = self.mean(metric)
            told.append(f"{name} {'unknown' if value is None else f'{value * scale:.1f}{unit}'}")
        return ", ".join(told)


@dataclass(slots=True)
class Phase:
    """One phase, by GPU: what one of eight does is not to be lost in a mean."""

    name: str
    gpus: dict[str, Gpu] = field(default_factory=dict)

    @property
    def bounds(self) -> list[str]:
        """What bounds the GPUs at work; ``idle`` alone if none works, ``unknown`` if none is seen.

        A GPU that serves nothing says nothing of those that serve.
        """
        found = list(dict.fromkeys(gpu.bound for gpu in self.gpus.values())) or ["unknown"]
        return [bound for bound in found if bound != "idle"] or found

    def words(self) -> str:
        """The phase in sentences: one for each thing that bounds GPUs."""
        alike: dict[str, list[str]] = {}
        for name, gpu in self.gpus.items():
            alike.setdefault(gpu.bound, []).append(name)
        if not alike:
            return f"{self.name}: no sample."
        return " ".join(
            f"{self.name}: {_MEANING[bound]} (GPU {', '.join(names)}; "
            f"{'' if len(names) == 1 else f'of {names[0]}: '}{self.gpus[names[0]].figures()})."
            for bound, names in alike.items()
        )


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


_FAULTS: Mapping[str, str] = {
    "latency": "is latency-bound",
    "unknown": "cannot be told",
    "idle": "leaves every GPU idle: is the exporter on the engine's machine?",
}


@dataclass(slots=True)
class GpuRun:
    """What was measured so far."""

    plan: GpuPlan
    phases: list[Phase] = field(default_factory=list)
    partial: bool = True

    @property
    def passed(self) -> bool:
        """Whether it ended, and found no fault."""
        return not self.partial and not self.faults()

    def faults(self) -> list[str]:
        """What fails the probe, in words."""
        found = []
        for phase in self.phases:
            if phase.name == "idle":
                if not {"idle", "unknown"}.issuperset(phase.bounds):
                    found.append("the GPUs were not idle before: somebody else uses them")
                continue
            faulty = (_FAULTS[bound] for bound in phase.bounds if bound in _FAULTS)
            found += [f"{phase.name} {fault}" for fault in faulty]
        return found

    def words(self) -> str:
        """The answer."""
        faults = "; ".join(self.faults())
        said = " ".join(phase.words() for phase in self.phases) or "Nothing was measured."
        return said + (f" {faults}." * bool(faults))

    def table(self) -> list[list[str]]:
        """Rows of text: a GPU in a phase each."""
        rows = [["phase", "gpu", "bound by", "tensor", "memory", "resident", "power W", "n"]]
        for phase in self.phases:
            for name, gpu in phase.gpus.items():
                means = [gpu.mean(metric) for metric in FIGURES]
                figures = ["absent" if value is None else f"{value:.3f}" for value in means]
                count = max((len(values) for values in gpu.samples.values()), default=0)
                rows.append([phase.name, name, gpu.bound, *figures, str(count)])
        return rows

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return document(
            "gpu",
            self.plan.url,
            partial=self.partial,
            passed=self.passed,
            faults=self.faults(),
            words=self.words(),
            phases=[
                {
                    "name": phase.name,
                    "bounds": phase.bounds,
                    "gpus": {
                        name: {
                            **asdict(gpu),
                            "bound": gpu.bound,
                            "means": {metric: gpu.mean(metric) for metric in gpu.samples},
                        }
                        for name, gpu in phase.gpus.items()
                    },
                }
                for phase in self.phases
            ],
        )

    def page(self) -> str:
        """The HTML page."""
        groups = {
            f"{phase.name} {name}": {
                metric: value for metric in FIGURES[:3] if (value := gpu.mean(metric)) is not None
            }
            for phase in self.phases
            for name, gpu in phase.gpus.items()
        }
        return bars("What bounds the GPUs", self.words(), groups, self.table())


async def measure(run: GpuRun, progress: Progress) -> None:
    """Fill ``run`` phase by phase. What is there when it is cancelled stays."""
    plan = run.plan
    progress.expect(len(PHASES))
    async with session(plan.timeout, plan.api_key) as http:
        server = await find_server(http, plan.url)
        await gpu_figures(http, plan.exporter)
        room = server.room(plan.max_tokens)
        context = plan.context or min(_USUAL, _USUAL if room is None else room // 2)
        if why := server.refuses(context, plan.max_tokens):
            raise ProbeError(f"--context {label(context)}: {why}")
        await _phase(run, http, "idle", asyncio.sleep(plan.seconds + plan.settle))
        progress.step(run.phases[-1].words())
        await _phase(run, http, "prefill", _prefill(plan, context, http, server))
        progress.step(run.phases[-1].words())
        ready = asyncio.Event()
        await _phase(run, http, "decode", _decode(plan, context, http, server, ready), ready)
        progress.step(run.phases[-1].words())
    run.partial = False


async def _prefill(
    plan: GpuPlan, context: int, http: aiohttp.ClientSession, server: Server
) -> None:
    """Long prompts one after the other, none of which begins like another."""
    until = asyncio.get_running_loop().time() + plan.seconds + plan.settle
    seed = 0
    while seed == 0 or asyncio.get_running_loop().time() < until:
        text = f"{seed}. " + TEXTS["prose"](context * 3, seed)
        await complete(http, server, text, max_tokens=1)
        seed += 1


async def _decode(
    plan: GpuPlan,
    context: int,
    http: aiohttp.ClientSession,
    server: Server,
    ready: asyncio.Event,
) -> None:
    """One prompt, cached by the first answer, continued again and again."""
    text = TEXTS["prose"](context * 3, 10_000)
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
            for name, figures in (await gpu_figures(http, plan.exporter)).items():
                samples = phase.gpus.setdefault(name, Gpu()).samples
                for metric, value in figures.items():
                    samples.setdefault(metric, []).append(value)
            await asyncio.wait({task}, timeout=plan.interval)
        await task
    finally:
        task.cancel()
