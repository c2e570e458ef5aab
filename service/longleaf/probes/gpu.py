"""``longleaf probe gpu``: what bounds idle, prefill and decode: compute, memory or latency."""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from longleaf.probes.bounds import FIGURES, Phase
from longleaf.probes.chart import bars
from longleaf.probes.client import ProbeError, Server, complete, find_server, session, steps_of
from longleaf.probes.exposition import gpu_figures
from longleaf.probes.lengths import label
from longleaf.probes.progress import Progress
from longleaf.probes.report import document
from longleaf.probes.texts import TEXTS

PHASES = ("idle", "prefill", "decode")
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
            why = f": {phase.lost[-1]}" if phase.lost and not phase.gpus else ""
            faulty = (_FAULTS[bound] for bound in phase.bounds if bound in _FAULTS)
            found += [f"{phase.name} {fault}{why}" for fault in faulty]
        return found

    def words(self) -> str:
        """The answer."""
        faults = "; ".join(self.faults())
        said = " ".join(phase.words() for phase in self.phases) or "Nothing was measured."
        return said + (f" {faults}." * bool(faults))

    def table(self) -> list[list[str]]:
        """Rows of text: a GPU in a phase each."""
        head = ["phase", "gpu", "bound by", "tensor", "memory", "SMs", "resident", "power W", "n"]
        rows = [head]
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
                    "step_seconds": phase.step,
                    "lost_samples": phase.lost,
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
                metric: value for metric in FIGURES[:4] if (value := gpu.mean(metric)) is not None
            }
            for phase in self.phases
            for name, gpu in phase.gpus.items()
        }
        return bars("What bounds the GPUs", self.words(), groups, self.table())


async def measure(run: GpuRun, progress: Progress) -> None:
    """Fill ``run`` phase by phase. What is there when it is cancelled stays."""
    plan = run.plan
    progress.expect(len(PHASES))
    async with session(plan.timeout) as http:
        server = await find_server(http, plan.url, plan.api_key)
        await gpu_figures(http, plan.exporter)
        room = server.room(plan.max_tokens)
        context = plan.context or min(_USUAL, _USUAL if room is None else room // 2)
        if why := server.refuses(context, plan.max_tokens):
            raise ProbeError(f"--context {label(context)}: {why}")
        await _phase(run, http, Phase("idle"), asyncio.sleep(plan.seconds + plan.settle))
        progress.step(run.phases[-1].words())
        await _phase(run, http, Phase("prefill"), _prefill(plan, context, http, server))
        progress.step(run.phases[-1].words())
        ready = asyncio.Event()
        steps: list[float] = []
        work = _decode(plan, context, http, server, ready, steps)
        await _phase(run, http, Phase("decode", steps=steps), work, ready)
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
    steps: list[float],
) -> None:
    """One prompt, cached by the first answer, continued again and again; ``steps`` gets the mean
    seconds of a step of each answer that tells or shows them.
    """
    text = TEXTS["prose"](context * 3, 10_000)
    await complete(http, server, text, max_tokens=1)
    ready.set()
    until = asyncio.get_running_loop().time() + plan.seconds + plan.settle
    while True:
        answer = await complete(http, server, text, max_tokens=plan.max_tokens)
        with suppress(ProbeError):
            steps.append(answer.decode_seconds / steps_of(answer))
        if asyncio.get_running_loop().time() >= until:
            return


async def _phase(
    run: GpuRun,
    http: aiohttp.ClientSession,
    phase: Phase,
    work: Awaitable[None],
    ready: asyncio.Event | None = None,
) -> None:
    """Sample while ``work`` goes on, from ``ready`` and the settling time on."""
    plan = run.plan
    run.phases.append(phase)
    task = asyncio.ensure_future(work)
    try:
        if ready is not None:
            waiting = asyncio.ensure_future(ready.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await asyncio.wait({task}, timeout=plan.settle)
        while not task.done():
            try:
                phase.take(await gpu_figures(http, plan.exporter))
            except ProbeError as error:  # an exporter that is started anew is there again soon
                phase.lost.append(str(error))
            await asyncio.wait({task}, timeout=plan.interval)
        await task
    finally:
        task.cancel()
