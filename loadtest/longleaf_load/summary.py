"""What a run amounts to: by context, by kind of text, by phase."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from longleaf.metrics import CONTEXT_BUCKETS, context_bucket
from longleaf_load.arrivals import Phase
from longleaf_load.cautions import cautions
from longleaf_load.promises import Promise, promises
from longleaf_load.records import Record
from longleaf_load.simulation import simulated
from longleaf_load.slo import Slo

_POINTS = 2_000
"""Requests that the report's clouds show at most."""


def summarize(
    records: Sequence[Record], phases: Sequence[Phase], slo: Slo, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON report. ``about``: what was run, where, against what; ``ran_seconds`` where that was
    less than the phases, ``simulated`` where that is known although nothing was answered.
    """
    judged = [record for record in records if record.outcome != "cancelled"]
    met = sum(map(slo.met_by, judged))
    share = met / len(judged) if judged else 0.0
    served = [record.ttft for record in records if record.outcome == "ok"]
    kept = promises(records)
    report = {
        **about,
        "simulated": simulated(records) or list(about.get("simulated", ())),
        "fingerprints": sorted({one.fingerprint for one in records if one.fingerprint}),
        "slo": {
            "words": slo.words(),
            "share": slo.share,
            "met": share,
            "passed": share >= slo.share,
            "unmeasured": dict(Counter(name for one in records for name in slo.unmeasured(one))),
        },
        "requests": len(records),
        "outcomes": dict(Counter(record.outcome for record in records)),
        "refusals": _reasons(records, "refused"),
        "failures": _reasons(records, "failed"),
        "retry_after": _promised(records, kept),
        "retried": _retried(records),
        "exact_prompts": _exact(records),
        "late_p99_seconds": _quantile([record.late for record in records], 0.99),
        "ttft_p50_seconds": _quantile([ttft for ttft in served if ttft is not None], 0.5),
        "contexts": _groups(
            records, lambda record: context_bucket(record.prompt_tokens), CONTEXT_BUCKETS
        ),
        "texts": _groups(
            records, lambda record: record.text, sorted({one.text for one in records})
        ),
        "phases": _phases(phases, records, kept, slo, about.get("ran_seconds")),
        "points": _points(records),
    }
    return {**report, "cautions": list(cautions(report))}


def _groups(
    records: Sequence[Record], key: Callable[[Record], str], names: Iterable[str]
) -> dict[str, Any]:
    groups: dict[str, list[Record]] = {name: [] for name in names}
    for record in records:
        groups[key(record)].append(record)
    return {name: _group(members) for name, members in groups.items() if members}


def _group(records: Sequence[Record]) -> dict[str, Any]:
    served = [record for record in records if record.outcome == "ok"]
    return {
        "requests": len(records),
        "served": len(served),
        "refused": sum(record.outcome == "refused" for record in records),
        "failed": sum(record.outcome == "failed" for record in records),
        "prompt_tokens_mean": statistics.fmean(one.prompt_tokens for one in records)
        if records
        else 0.0,
        "ttft_ms": _spread([one.ttft for one in served]),
        "tpot_ms": _spread([one.tpot for one in served]),
        "gap_p99_ms": _spread([one.gap_p99 for one in served]),
        "queue_ms": _spread([one.queue_seconds for one in served]),
        "prefill_ms": _spread([one.prefill_seconds for one in served]),
        "commit_len": _commit_len(served),
    }


def _commit_len(records: Iterable[Record]) -> float | None:
    """Tokens that a step committed on average: a long answer has more of them than a short one."""
    counted = [(one.commit_len, one.steps) for one in records if one.commit_len and one.steps]
    steps = sum(steps for _, steps in counted)
    return sum(tokens * steps for tokens, steps in counted) / steps if steps else None


def _phases(
    phases: Sequence[Phase],
    records: Sequence[Record],
    kept: Sequence[Promise],
    slo: Slo,
    ran: float | None,
) -> list[dict[str, Any]]:
    """Each phase, of the seconds that it had where the run ended after ``ran`` of them."""
    by_phase: list[list[Record]] = [[] for _ in phases]
    for record in records:
        by_phase[record.phase].append(record)
    begin, found = 0.0, []
    for number, (phase, own) in enumerate(zip(phases, by_phase, strict=True)):
        seconds = phase.seconds if ran is None else min(phase.seconds, max(0.0, ran - begin))
        promised = _promised(own, [one for one in kept if one.phase == number])
        found.append({**_phase(phase, seconds, own, slo), "retry_after": promised})
        begin += phase.seconds
    return found


def _phase(phase: Phase, seconds: float, own: Sequence[Record], slo: Slo) -> dict[str, Any]:
    asked = [record for record in own if record.attempt == 1]
    arrived = [record for record in asked if record.turn == 1]
    good = [record for record in own if slo.met_by(record)]

    def rate(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    return {
        "name": phase.name,
        "seconds": seconds,
        "planned_seconds": phase.seconds,
        "offered_per_second": rate(len(arrived)),
        "offered_tokens_per_second": rate(sum(one.prompt_tokens for one in arrived)),
        "later_turns_per_second": rate(len(asked) - len(arrived)),
        "goodput_per_second": rate(len(good)),
        "goodput_prompt_tokens_per_second": rate(sum(one.prompt_tokens for one in good)),
        "goodput_completion_tokens_per_second": rate(
            sum(one.completion_tokens or 0 for one in good)
        ),
        "refusals": _reasons(own, "refused"),
        "failures": _reasons(own, "failed"),
        **_group(own),
    }


def _reasons(records: Iterable[Record], outcome: str) -> dict[str, int]:
    counts = Counter(record.reason or "unknown" for record in records if record.outcome == outcome)
    return dict(counts.most_common())


def _promised(records: Sequence[Record], kept: Sequence[Promise]) -> dict[str, Any]:
    saturated = [one for one in records if one.outcome == "refused" and one.status in {429, 503}]
    errors = [promise.error for promise in kept]
    return {
        "refusals": len(saturated),
        "without": sum(one.retry_after is None for one in saturated),
        "told_seconds": _quantiles([promise.told for promise in kept]),
        "true_seconds": _quantiles([promise.true for promise in kept]),
        "checked": len(kept),
        "median_error": statistics.median(errors) if errors else None,
    }


def _retried(records: Sequence[Record]) -> dict[str, int]:
    """How requests fared that came again after a refusal, by their attempt."""
    again = [record for record in records if record.attempt > 1]
    return {
        "attempts": len(again),
        "served": sum(record.outcome == "ok" for record in again),
        "refused": sum(record.outcome == "refused" for record in again),
    }


def _exact(records: Sequence[Record]) -> dict[str, int]:
    told = [record for record in records if record.counted_tokens is not None]
    wrong = sum(record.counted_tokens != record.prompt_tokens for record in told)
    return {"told": len(told), "wrong": wrong}


def _points(records: Sequence[Record]) -> list[list[Any]]:
    """Tokens, milliseconds to the first and for each token, commit_len, kind of text."""
    served = [record for record in records if record.outcome == "ok" and record.ttft is not None]
    every = max(1, math.ceil(len(served) / _POINTS))
    return [
        [one.prompt_tokens, _ms(one.ttft), _ms(one.tpot), one.commit_len, one.text]
        for one in served[::every]
    ]


def _spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    return _quantiles([value * 1e3 for value in seconds if value is not None])


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    points = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    found = {name: _quantile(values, at) for name, at in points.items()}
    return {"mean": statistics.fmean(values), **{k: v for k, v in found.items() if v is not None}}


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between the values next to it."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
