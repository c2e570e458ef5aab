"""Where a step's GPU time goes, from a torch profiler trace that SGLang writes."""

import gzip
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.gpu.client import Client
from ops.gpu.phases import GPU

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all-reduce": ("AllReduce", "all_reduce", "cross_device_reduce", "AllGather"),
    "attention": ("verify_mla", "gather_prefix", "_fwd_kernel", "_fwd_grouped_kernel"),
    "accept": ("accept_", "argmax", "ArgMax"),
    "build": ("expand_tree", "build_tree", "top_k_", "topk_marginal"),
    "compaction": ("compact_kv",),
    "experts": ("fused_moe", "moe_align", "topk", "moe_sum"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitK", "gemv", "cublas"),
    "norms and rotary": ("norm", "Norm", "rotary", "rope"),
    "copies": ("Memcpy", "Memset", "copy", "fill"),
}
"""Groups of kernels by what their names contain; the first group that matches takes a kernel."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Idle GPU time between two kernels, in microseconds, and the kernels around it."""

    microseconds: float
    after: str
    before: str


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the profiled span: milliseconds, share by group, share idle, the longest kinds of gap."""

    span_ms: float
    groups: dict[str, float]
    idle: float
    gaps: list[Gap]
    kernels: list[tuple[str, int, float]]
    """The ten kernels with the most time: name, launches, milliseconds in all."""


def profile(
    client: Client, folder: Path, prompt: Sequence[int], tokens: int, steps: int, ranks: int = 1
) -> list[Path]:
    """Profile ``steps`` scheduler steps while an answer is decoded; returns each rank's trace."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.rglob("*.trace.json.gz"))
    new: list[Path] = []
    options = {
        "output_dir": str(folder),
        "num_steps": steps,
        "activities": ["CPU", "GPU"],
        # SGLang records Python's stack by default, which makes the host many times slower.
        "with_stack": False,
        "record_shapes": False,
    }
    client.post("/start_profile", options, 60)
    client.generate(prompt, tokens, timeout=300)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        new = sorted(set(folder.rglob("*.trace.json.gz")) - before)
        if len(new) == ranks and all(_complete(trace) for trace in new):
            return sorted(new, key=rank_of)
        time.sleep(0.5)
    raise TimeoutError(f"{len(new)} of {ranks} traces came to {folder}")


def rank_of(trace: Path) -> int:
    """The tensor-parallel rank in a trace's name."""
    match = re.search(r"TP-(\d+)", trace.name)
    return int(match[1]) if match else 0


def _complete(trace: Path) -> bool:
    try:
        read_trace(trace)
    except (EOFError, ValueError, OSError):
        return False
    return True


def read_trace(trace: Path) -> list[dict[str, Any]]:
    """All events of a trace."""
    with gzip.open(trace) as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


def gpu_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events on the GPU, by time: kernels, copies and fills."""
    return sorted((e for e in events if e.get("cat") in GPU), key=lambda e: float(e["ts"]))


def group_of(name: str) -> str:
    """The group of a kernel."""
    for group, parts in GROUPS.items():
        if any(part in name for part in parts):
            return group
    return "other"


def shares(events: Iterable[Mapping[str, Any]]) -> Shares:
    """Add up a trace's GPU events. Overlapping kernels each count in their own group."""
    items = list(events)
    if not items:
        raise ValueError("the trace has no GPU event")
    span = max(e["ts"] + e["dur"] for e in items) - items[0]["ts"]
    groups: dict[str, float] = {}
    kernels: dict[str, tuple[int, float]] = {}
    gaps: dict[tuple[str, str], float] = {}
    busy_until, last, idle = items[0]["ts"], items[0]["name"], 0.0
    for event in items:
        name, group = event["name"], group_of(event["name"])
        groups[group] = groups.get(group, 0.0) + event["dur"]
        count, total = kernels.get(name, (0, 0.0))
        kernels[name] = (count + 1, total + event["dur"])
        if event["ts"] > busy_until:
            gap = event["ts"] - busy_until
            idle += gap
            gaps[last, name] = gaps.get((last, name), 0.0) + gap
        if event["ts"] + event["dur"] > busy_until:
            busy_until, last = event["ts"] + event["dur"], name
    longest = sorted(gaps.items(), key=lambda item: -item[1])[:6]
    most = sorted(kernels.items(), key=lambda item: -item[1][1])[:10]
    return Shares(
        span_ms=round(span / 1e3, 3),
        groups={
            group: round(total / span, 4)
            for group, total in sorted(groups.items(), key=lambda item: -item[1])
        },
        idle=round(idle / span, 4),
        gaps=[Gap(round(us, 1), after[:90], before[:90]) for (after, before), us in longest],
        kernels=[(name[:90], count, round(us / 1e3, 3)) for name, (count, us) in most],
    )
