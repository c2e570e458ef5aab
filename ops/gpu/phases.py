"""Phases, launches and gaps of decode steps, read from a torch profiler trace of the engine.

The worker names its phases in a profile (`longleaf.draft` … `longleaf.compact`): ranges on the
host. A launch links each kernel to the range that it was launched in. The same boundaries as those
of the engine's own clock follow: a CUDA event recorded at a phase's end is reached when all that
was launched before it has run, and not before the host recorded it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

PREFIX = "longleaf."
PHASES = ("draft", "build", "verify", "accept", "compact")
SCHEDULER = "scheduler"
"""What is launched outside a step's phases."""
LAST = "compact"

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")

REMEDIES: Mapping[tuple[str, str], str] = {
    ("verify", "verify"): "kernels of one graph: programmatic dependent launch between them",
    ("draft", "draft"): "kernels of one graph, or the launches before it: one graph for all",
    ("draft", "build"): "the build is launched eagerly: capture it behind the drafter's graph",
    ("build", "verify"): "the host prepares the verify graph: prepare it before the draft is done",
    ("verify", "accept"): "accept is launched eagerly: capture accept to compaction in a graph",
    ("accept", "accept"): "small launches: capture accept to compaction in a graph",
    ("accept", "compact"): "small launches: capture accept to compaction in a graph",
    ("compact", "compact"): "the draft KV's append is SGLang's eager code: capture it in a graph",
    ("compact", "draft"): "the scheduler between two steps: a host that is further ahead",
}
OTHERWISE = "the host was behind: fewer launches between the graphs"


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the host does a step: launches of each kind, operators, milliseconds in the phases.

    host_ms is under the profiler, which slows the host down.
    """

    kernels: float
    graphs: float
    copies: float
    operators: float
    host_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class PhaseGap:
    """Idle GPU time a step between kernels of two phases, and what would close it."""

    microseconds: float
    between: tuple[str, str]
    kernels: tuple[str, str]
    remedy: str


@dataclass(frozen=True, slots=True)
class Steps:
    """What a trace says about its whole steps; times in milliseconds a step."""

    count: int
    phases: dict[str, float]
    host: HostCost
    gaps: list[PhaseGap]
    all_reduce: float
    """Milliseconds a step in all-reduce kernels, waiting for other ranks included."""
    idle: float
    """Milliseconds a step without a kernel."""


@dataclass(frozen=True, slots=True)
class _Range:
    phase: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Work:
    """Something that ran on the GPU. launched: when the host asked for it."""

    name: str
    launched: float
    start: float
    end: float


def is_all_reduce(name: str) -> bool:
    """Whether a kernel reduces over ranks: NCCL's or SGLang's own."""
    lowered = name.lower()
    return any(part in lowered for part in ("allreduce", "all_reduce", "cross_device_reduce"))


def read_steps(events: Iterable[Mapping[str, Any]]) -> Steps:
    """Read the whole steps of a trace: those whose first and last phase are both in it.

    Raises:
        ValueError: if there are fewer than two.
    """
    items = list(events)
    steps = _steps(_ranges(items))
    if len(steps) < 2:
        raise ValueError(f"the trace has {len(steps)} whole steps of the engine")
    host = [e for e in items if e.get("cat") in RUNTIME and "ts" in e]
    work = _work(items, host)
    # The first step lacks what ran before it.
    measured = steps[1:]
    begin, end = measured[0][0].start, measured[-1][-1].end
    count = len(measured)
    inside = [item for item in work if begin <= item.launched <= end]
    return Steps(
        count=count,
        phases=_phase_times(steps, work),
        host=_host_cost(items, host, measured, count),
        gaps=_gaps(inside, [part for step in measured for part in step], count),
        all_reduce=sum(w.end - w.start for w in inside if is_all_reduce(w.name)) / count / 1e3,
        idle=sum(gap for gap, _, _ in _idle(inside)) / count / 1e3,
    )


def _ranges(items: Sequence[Mapping[str, Any]]) -> list[_Range]:
    found = [
        _Range(e["name"].removeprefix(PREFIX), e["ts"], e["ts"] + e["dur"])
        for e in items
        if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)
    ]
    return sorted(found, key=lambda item: item.start)


def _steps(ranges: Sequence[_Range]) -> list[list[_Range]]:
    steps: list[list[_Range]] = []
    current: list[_Range] = []
    for part in ranges:
        current.append(part)
        if part.phase == LAST:
            steps.append(current)
            current = []
    # A profile that starts within a step has only its end.
    full = max((len(step) for step in steps), default=0)
    return [step for step in steps if len(step) == full]


def _work(items: Sequence[Mapping[str, Any]], host: Sequence[Mapping[str, Any]]) -> list[_Work]:
    """What ran on the GPU, by launch.

    Work whose launch the trace lacks counts as launched with what ran before it.
    """
    launches = {
        e["args"]["correlation"]: float(e["ts"]) for e in host if "correlation" in e.get("args", {})
    }
    found: list[_Work] = []
    launched = 0.0
    ran = (e for e in items if e.get("cat") in GPU and "DtoH" not in e["name"])
    for event in sorted(ran, key=lambda e: float(e["ts"])):  # copies to the host: another stream
        launched = launches.get(event.get("args", {}).get("correlation"), launched)
        begin = float(event["ts"])
        found.append(_Work(event["name"], launched, begin, begin + event["dur"]))
    return sorted(found, key=lambda item: item.launched)


def _phase_times(steps: Sequence[Sequence[_Range]], work: Sequence[_Work]) -> dict[str, float]:
    times = [item.launched for item in work]
    done = list(accumulate((item.end for item in work), max))

    def reached(host: float) -> float:
        """When the GPU reaches an event that the host records at this time."""
        index = bisect_right(times, host)
        return max(host, done[index - 1]) if index else host

    totals: dict[str, float] = {}
    for step in steps[1:]:
        mark = first = reached(step[0].start)
        for part in step:
            then = reached(part.end)
            totals[part.phase] = totals.get(part.phase, 0.0) + then - mark
            mark = then
        totals["total"] = totals.get("total", 0.0) + mark - first
    return {phase: total / (len(steps) - 1) / 1e3 for phase, total in totals.items()}


def _host_cost(
    items: Sequence[Mapping[str, Any]],
    host: Sequence[Mapping[str, Any]],
    steps: Sequence[Sequence[_Range]],
    count: int,
) -> HostCost:
    begin, end = steps[0][0].start, steps[-1][-1].end
    kinds = dict.fromkeys(LAUNCHES, 0)
    for event in host:
        if begin <= event["ts"] <= end:
            kind = next((kind for kind in LAUNCHES if kind in event["name"]), None)
            if kind is not None:
                kinds[kind] += 1
    operators = sum(e.get("cat") == "cpu_op" and begin <= e["ts"] <= end for e in items)
    spent: dict[str, float] = {}
    for step in steps:
        for part in step:
            spent[part.phase] = spent.get(part.phase, 0.0) + part.end - part.start
    return HostCost(
        kernels=round(kinds["LaunchKernel"] / count, 2),
        graphs=round(kinds["GraphLaunch"] / count, 2),
        copies=round((kinds["MemcpyAsync"] + kinds["MemsetAsync"]) / count, 2),
        operators=round(operators / count, 1),
        host_ms={phase: round(us / count / 1e3, 4) for phase, us in spent.items()},
    )


def _idle(work: Iterable[_Work]) -> Iterable[tuple[float, _Work, _Work]]:
    """Gaps of the GPU: microseconds, what ended last before, what starts after."""
    last: _Work | None = None
    for item in sorted(work, key=lambda item: item.start):
        if last is not None and item.start > last.end:
            yield item.start - last.end, last, item
        if last is None or item.end > last.end:
            last = item


def _gaps(work: Sequence[_Work], ranges: Sequence[_Range], count: int) -> list[PhaseGap]:
    starts = [part.start for part in ranges]

    def phase_of(item: _Work) -> str:
        index = bisect_right(starts, item.launched) - 1
        inside = index >= 0 and item.launched <= ranges[index].end
        return ranges[index].phase if inside else SCHEDULER

    totals: dict[tuple[str, str], float] = {}
    longest: dict[tuple[str, str], tuple[float, str, str]] = {}
    for gap, before, after in _idle(work):
        between = phase_of(before), phase_of(after)
        totals[between] = totals.get(between, 0.0) + gap
        if gap > longest.get(between, (0.0, "", ""))[0]:
            longest[between] = gap, before.name[:60], after.name[:60]
    return [
        PhaseGap(
            round(total / count, 1),
            between,
            longest[between][1:],
            REMEDIES.get(between, OTHERWISE),
        )
        for between, total in sorted(totals.items(), key=lambda item: -item[1])
    ]


def worst_disagreement(
    ours: Mapping[str, float], profiled: Mapping[str, float], least_share: float = 0.02
) -> tuple[float, str]:
    """The largest relative difference of a phase's time, and the phase.

    Phases below that share of the step are left out: an event costs as much as they do.

    Raises:
        ValueError: if a phase of the profile is missing from ours.
    """
    worst = 0.0, ""
    for phase in PHASES:
        if profiled.get(phase, 0.0) < least_share * profiled["total"]:
            continue
        if phase not in ours:
            raise ValueError(f"our metrics timed no {phase}")
        worst = max(worst, (abs(ours[phase] / profiled[phase] - 1.0), phase))
    return worst
