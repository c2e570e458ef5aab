"""What a replica reports of its load (``/v1/loads``), read again and again."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_GB = 2**30
_LARGEST = 2.0**53
"""No sum that an engine reports is larger; infinities and NaN, which JSON can carry, are not."""


@dataclass(frozen=True, slots=True)
class DecodeMoments:
    """Sums over all decode steps since the engine's start; differences of two are a window."""

    steps: float
    batch: float
    seconds: float
    batch_squared: float
    batch_seconds: float
    tokens: float

    def since(self, earlier: "DecodeMoments") -> "DecodeMoments":
        """The window between ``earlier`` and this."""
        return DecodeMoments(
            self.steps - earlier.steps,
            self.batch - earlier.batch,
            self.seconds - earlier.seconds,
            self.batch_squared - earlier.batch_squared,
            self.batch_seconds - earlier.batch_seconds,
            self.tokens - earlier.tokens,
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over the steps of each request, from the engine's own metrics."""

    steps: float
    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One answer of ``/v1/loads``, its ranks added up; ``None`` where the replica does not say."""

    running: int
    waiting: int
    used_tokens: int
    """KV pool slots that running requests hold; what the cache could give back is not in it."""
    capacity_tokens: int | None
    max_running: int | None
    bytes_per_token: float | None
    prefilled_tokens: int
    """Prompt tokens computed since the start."""
    prefill_seconds: float
    """Time spent on them."""
    decode: DecodeMoments | None
    step_totals: StepTotals | None = None
    """Asked for only where ``decode`` is missing."""


def parse_loads(answer: object) -> LoadReport:
    """Read an answer of ``/v1/loads``; ``ValueError`` says what is wrong."""
    ranks = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        raise ValueError("/v1/loads answered without a list 'loads'")
    if not ranks:
        raise ValueError("/v1/loads lists no rank")
    capacity = int(_sum(ranks, "max_total_num_tokens"))
    max_running = int(_sum(ranks, "max_running_requests"))
    cache_bytes = sum(_number(_object(rank, "memory"), "kv_cache_gb") for rank in ranks) * _GB
    return LoadReport(
        running=int(_sum(ranks, "num_running_reqs")),
        waiting=int(_sum(ranks, "num_waiting_reqs")),
        used_tokens=int(_sum(ranks, "num_used_tokens")),
        capacity_tokens=capacity or None,
        max_running=max_running or None,
        bytes_per_token=cache_bytes / capacity if capacity and cache_bytes else None,
        prefilled_tokens=int(_sum(ranks, "total_prefill_uncached_tokens")),
        prefill_seconds=_sum(ranks, "total_prefill_busy_us") / 1e6,
        decode=_moments(ranks),
    )


def parse_step_totals(metrics: str) -> StepTotals | None:
    """Read ``longleaf_step_seconds`` (whole steps) and ``longleaf_commit_len`` from an engine's
    ``/metrics``; ``None`` where they are not there.
    """
    sums = dict.fromkeys(("step_seconds_count", "step_seconds_sum", "commit_len_sum"), 0.0)
    for line in metrics.splitlines():
        if not line.startswith("longleaf_"):
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.removeprefix("longleaf_").partition("{")
        if name in sums and ('phase="total"' in labels or name == "commit_len_sum"):
            with contextlib.suppress(ValueError):
                number = float(value)
                sums[name] += number if math.isfinite(number) else 0.0
    if not sums["step_seconds_count"]:
        return None
    return StepTotals(sums["step_seconds_count"], sums["step_seconds_sum"], sums["commit_len_sum"])


def restarted(earlier: LoadReport, later: LoadReport) -> bool:
    """Whether the engine is another one than before: a sum fell, or its pool changed."""
    if later.capacity_tokens != earlier.capacity_tokens:
        return True
    if later.prefilled_tokens < earlier.prefilled_tokens:
        return True
    return earlier.decode is not None and (
        later.decode is None or later.decode.steps < earlier.decode.steps
    )


def _moments(ranks: Sequence[Mapping[str, Any]]) -> DecodeMoments | None:
    """SGLang's ``[n, Σb, Σt_us, Σb², Σb·t, Σtokens]``."""
    totals = [0.0] * 6
    for rank in ranks:
        values = rank.get("decode_moments")
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != 6:
            raise ValueError("decode_moments must have 6 numbers")
        for index, value in enumerate(values):
            if not _is_number(value):
                raise ValueError("decode_moments must have 6 numbers")
            totals[index] += _checked("decode_moments", value)
    if not totals[0]:
        return None
    steps, batch, micros, squared, batch_micros, tokens = totals
    return DecodeMoments(steps, batch, micros / 1e6, squared, batch_micros / 1e6, tokens)


def _object(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(name: str, value: Any) -> float:
    if not abs(value) <= _LARGEST:
        raise ValueError(f"loads: {name} is {str(value)[:30]}, more than any engine counts")
    return float(value)


def _number(source: Mapping[str, Any], name: str) -> float:
    value = source.get(name)
    return max(0.0, _checked(name, value)) if _is_number(value) else 0.0


def _sum(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_number(rank, name) for rank in ranks)
