"""Turns measurements into the rows of the results file."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from kernel_bench.cases import BARS, Problem, grid_row, problems
from kernel_bench.timing import Sample
from ops.bench.results import Row

OURS, TRITON, SPLITKV, SPLITKV_LARGE = "longleaf", "sglang", "splitkv", "splitkv_any_shared"


@dataclass
class Measured:
    """What a run measured.

    times: microseconds a launch by (contender, problem name). copy: bytes a second, read and
    written; mma: operations a second. steps: microseconds by row name. grid: for each problem
    microseconds of this project's kernel and of SGLang's. errors: relative errors by contender.
    missing: why a contender or ceiling was not measured.
    """

    times: dict[tuple[str, str], Sample] = field(default_factory=dict)
    copy: Sample | None = None
    mma: Sample | None = None
    steps: dict[str, Sample] = field(default_factory=dict)
    grid: dict[Problem, tuple[Sample, Sample]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def why(self, *names: str) -> str:
        """Say why something was not measured."""
        reasons = [self.missing[name] for name in names if name in self.missing]
        return "not measured: " + (reasons[0] if reasons else "left out of this run")


def rows(measured: Measured) -> list[Row]:
    """The named rows with their bars first, then ceilings, times, other ratios and the grid."""
    found = {row.name: row for row in _all_rows(measured)}
    named = [
        replace(found[bar.name], bar=bar.bar, better=bar.better, stretch=bar.stretch)
        for bar in BARS
    ]
    return named + [row for name, row in found.items() if name not in {b.name for b in BARS}]


def _all_rows(measured: Measured) -> Iterator[Row]:
    yield from _shares(measured)
    yield from _ratios(measured)
    yield from _ceilings(measured)
    for name in problems():
        for contender in (OURS, TRITON, SPLITKV, SPLITKV_LARGE):
            sample = measured.times.get((contender, name))
            suffix = "" if contender == OURS else f"_{contender}"
            if sample or contender == OURS:
                yield _row(f"{name}{suffix}_us", sample, "us", measured.why(OURS), "lower")
    for name in ("build_tree_us", "compact_kv_us"):
        if name not in measured.steps:
            yield _row(name, None, "us", measured.why("steps", OURS), "lower")
    for name, sample in measured.steps.items():
        yield _row(name, sample, "us", "", "lower")
    for contender, error in measured.errors.items():
        yield Row(f"verify_n9_16k_{contender}_error", error, "relative", 1e-2, "lower")
    yield from _grid(measured)


def _shares(measured: Measured) -> Iterator[Row]:
    every = problems()
    for name, row in (
        ("verify_n9_185k", "verify_n9_185k_bf16_copy_share"),
        ("verify_n9_64k", "verify_n9_64k_copy_share"),
        ("decode_64k", "decode_64k_copy_share"),
        ("decode_185k", "decode_185k_copy_share"),
        ("verify_n9_185k_fp8", "verify_n9_185k_fp8_copy_share"),
        ("verify_b32_mixed", "verify_b32_mixed_copy_share"),
    ):
        yield _share(measured, name, row, every[name].bytes, measured.copy, "copy")
    for name, row in (
        ("verify_n9_185k", "verify_n9_185k_mma_share"),
        ("verify_n32_185k", "verify_n32_185k_mma_share"),
        ("verify_n64_64k", "verify_n64_64k_mma_share"),
        ("verify_h64_b4_64k", "verify_h64_b4_64k_mma_share"),
    ):
        yield _share(measured, name, row, every[name].flops, measured.mma, "mma")
    sample = measured.times.get((OURS, "verify_n9_185k"))
    rate = sample and sample.map(lambda us: every["verify_n9_185k"].bytes / us * 1e-3)
    yield replace(_row("verify_n9_185k_gb_s", rate, "GB/s", measured.why(OURS)), bar=1930.0)


def _share(
    measured: Measured, name: str, row: str, amount: float, ceiling: Sample | None, kind: str
) -> Row:
    """Amount (bytes or operations) a second over a ceiling."""
    time = measured.times.get((OURS, name))
    if time is None or ceiling is None:
        return _row(row, None, "share", measured.why(OURS, kind))
    return _row(row, time.map(lambda us: amount / us * 1e6 / ceiling.median), "share")


def _ratios(measured: Measured) -> Iterator[Row]:
    for name in ("verify_n9_1k", "verify_n9_16k", "verify_n9_185k", "decode_64k", "decode_185k"):
        yield _ratio(measured, f"{name}_x_triton", (TRITON, name), (OURS, name))
    yield _ratio(
        measured, "extend16_32k_x_triton", (TRITON, "extend16_32k"), (OURS, "extend16_32k")
    )
    for name in ("verify_n9_1k", "verify_n9_16k", "verify_n9_185k"):
        yield _ratio(measured, f"{name}_x_splitkv", (SPLITKV, name), (OURS, name))
        yield _ratio(measured, f"{name}_x_{SPLITKV_LARGE}", (SPLITKV_LARGE, name), (OURS, name))
    one = (OURS, "verify_n9_185k")
    yield _ratio(measured, "verify_n9_185k_fp8_speedup", one, (OURS, "verify_n9_185k_fp8"))
    # Efficiency is cached bytes a second: of 32 mixed lengths against one request of 185k.
    every = problems()
    weight = every["verify_b32_mixed"].bytes / every["verify_n9_185k"].bytes
    mixed = _ratio(measured, "verify_b32_mixed_efficiency", one, (OURS, "verify_b32_mixed"))
    yield _scaled(mixed, weight)


def _ratio(measured: Measured, name: str, slow: tuple[str, str], fast: tuple[str, str]) -> Row:
    """How many times as long `slow` takes; the spread takes both sides' quartiles at worst."""
    above, below = measured.times.get(slow), measured.times.get(fast)
    if above is None or below is None:
        return _row(name, None, "ratio", measured.why(slow[0], fast[0]))
    return _row(name, quotient(above, below), "ratio")


def quotient(above: Sample, below: Sample) -> Sample:
    """The quotient of two medians, between the extreme quotients of their quartiles."""
    spread = above.spread[0] / below.spread[1], above.spread[1] / below.spread[0]
    return Sample(above.median / below.median, spread, min(above.n, below.n))


def _scaled(row: Row, factor: float) -> Row:
    if row.value is None or row.spread is None:
        return row
    low, high = row.spread
    return replace(
        row,
        value=_rounded(row.value * factor),
        spread=(_rounded(low * factor), _rounded(high * factor)),
    )


def _ceilings(measured: Measured) -> Iterator[Row]:
    copy = measured.copy and measured.copy.map(lambda rate: rate * 1e-9)
    mma = measured.mma and measured.mma.map(lambda rate: rate * 1e-12)
    yield _row("copy_gb_s", copy, "GB/s", measured.why("copy"))
    yield _row("mma_bf16_tflop_s", mma, "TFLOP/s", measured.why("mma"))


def _grid(measured: Measured) -> Iterator[Row]:
    points = {
        grid_row(problem): quotient(triton, ours)
        for problem, (ours, triton) in measured.grid.items()
    }
    if points:
        worst = min(points.values(), key=lambda sample: sample.median)
        yield replace(_row("grid_min_ratio_vs_triton", worst, "ratio"), n=len(points))
    else:
        why = measured.why("grid", TRITON, OURS)
        yield _row("grid_min_ratio_vs_triton", None, "ratio", why)
    for name, sample in points.items():
        yield replace(_row(name, sample, "ratio"), bar=1.0)


def _row(
    name: str,
    sample: Sample | None,
    unit: str,
    why: str = "",
    better: Literal["higher", "lower"] = "higher",
) -> Row:
    if sample is None:
        return Row(name, None, unit, better=better, n=0, why=why)
    low, high = sample.spread
    return Row(
        name,
        _rounded(sample.median),
        unit,
        better=better,
        n=sample.n,
        spread=(_rounded(low), _rounded(high)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
