"""Phases, gaps and launches out of a trace made by hand, and their agreement with our metrics."""

from itertools import count
from typing import Any

import pytest

from ops.gpu.phases import PHASES, Steps, read_steps, worst_disagreement

STEP = 1000.0
"""Microseconds from step to step."""


class Trace:
    """Writes the events of a torch profiler trace."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._ids = count(1)

    def phase(self, name: str, start: float, end: float) -> None:
        self._add("user_annotation", f"longleaf.{name}", start, end)

    def launch(self, kernel: str, at: float, start: float, end: float, call: str) -> None:
        """A call on the host at a time, and when its kernel ran."""
        number = next(self._ids)
        self._add("cuda_runtime", call, at, at + 3, correlation=number)
        self._add("kernel", kernel, start, end, correlation=number)

    def _add(self, kind: str, name: str, start: float, end: float, **args: int) -> None:
        event = {"cat": kind, "name": name, "ts": start, "dur": end - start, "args": args}
        self.events.append(event)


def trace(steps: int = 4) -> list[dict[str, Any]]:
    """Steps whose draft takes 200 us of the GPU, verify 500, the rest of the phases less.

    The host is ahead until the verify has run; accept waits 40 us for it, the scheduler 60.
    """
    made = Trace()
    for number in range(steps):
        t = number * STEP
        made.phase("draft", t + 0, t + 50)
        made.launch("draft_kernel", t + 20, t + 60, t + 260, "cudaGraphLaunch")
        made.phase("build", t + 60, t + 80)
        made.launch("expand_tree", t + 70, t + 260, t + 300, "cuLaunchKernelEx")
        made.phase("verify", t + 100, t + 200)
        made.launch("verify_mla", t + 150, t + 310, t + 500, "cudaGraphLaunch")
        made.launch("allreduce_sum", t + 150, t + 500, t + 810, "cudaGraphLaunch")
        made.phase("accept", t + 220, t + 840)
        made.launch("accept_greedy", t + 830, t + 850, t + 870, "cudaLaunchKernel")
        made.phase("compact", t + 845, t + 890)
        made.launch("compact_kv", t + 860, t + 870, t + 1000, "cudaLaunchKernel")
        made.launch("Memcpy DtoH (x)", t + 861, t + 1000, t + 1500, "cudaMemcpyAsync")
    return made.events


def read(steps: int = 4) -> Steps:
    return read_steps(trace(steps))


def test_phases_end_when_the_gpu_has_done_what_was_launched_in_them() -> None:
    found = read().phases
    assert found["draft"] == pytest.approx(0.260)
    assert found["build"] == pytest.approx(0.040)
    assert found["verify"] == pytest.approx(0.510)
    # The host is at 840 when accept has been launched; the event is reached at 870.
    assert found["accept"] == pytest.approx(0.060)
    assert found["compact"] == pytest.approx(0.130)
    assert found["total"] == pytest.approx(1.000)


def test_the_first_step_is_left_out_and_partial_ones_too() -> None:
    assert read(4).count == 3
    cut = [event for event in trace(4) if event["ts"] >= 90]  # without the first draft
    assert read_steps(cut).count == 2
    with pytest.raises(ValueError, match="1 whole steps"):
        read(1)


def test_gaps_are_named_by_phase_with_what_would_close_them() -> None:
    gaps = {gap.between: gap for gap in read().gaps}
    assert gaps["verify", "accept"].microseconds == 40.0
    assert gaps["verify", "accept"].kernels == ("allreduce_sum", "accept_greedy")
    assert "capture accept to compaction" in gaps["verify", "accept"].remedy
    assert gaps["build", "verify"].microseconds == 10.0
    longest = [gap.microseconds for gap in read().gaps]
    assert longest == sorted(longest, reverse=True)


def test_launches_all_reduces_and_idle_time_are_a_steps() -> None:
    found = read()
    assert (found.host.kernels, found.host.graphs, found.host.copies) == (3.0, 3.0, 1.0)
    assert found.host.host_ms["verify"] == pytest.approx(0.1)
    assert found.all_reduce == pytest.approx(0.310)
    # Each of three steps waits 40 + 10; 60 before a draft counts where a step is before it.
    assert found.idle == pytest.approx((3 * 50 + 2 * 60) / 3e3)


def test_work_without_a_launch_in_the_trace_still_counts() -> None:
    whole = trace()
    cut = [e for e in whole if not (e["cat"] == "cuda_runtime" and "LaunchKernel" in e["name"])]
    found = read_steps(cut).phases
    assert found["total"] == pytest.approx(1.0, rel=0.2)
    assert found["verify"] >= 0.5


def test_our_metrics_are_held_against_the_profile() -> None:
    profiled = read().phases
    assert set(profiled) == {*PHASES, "total"}
    ours = profiled | {"verify": profiled["verify"] * 1.08, "build": profiled["build"] * 0.95}
    share, phase = worst_disagreement(ours, profiled)
    assert (round(share, 4), phase) == (0.08, "verify")
    tiny = profiled | {"total": 100.0}
    assert worst_disagreement(ours, tiny) == (0.0, "")
    with pytest.raises(ValueError, match="timed no accept"):
        worst_disagreement({k: v for k, v in profiled.items() if k != "accept"}, profiled)
