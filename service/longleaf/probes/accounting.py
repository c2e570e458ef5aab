"""Do the figures agree with one another: what answers say, what came, and what /metrics counts?"""

from dataclasses import dataclass
from enum import StrEnum

_CUT = 8
"""Drafts of an answer's last step that engines may count and its limit cuts off."""
_COUNTERS = ("_total", "_sum", "_count")


@dataclass(slots=True)
class Totals:
    """What all answers together say, and what the engine's metrics counted meanwhile."""

    steps: int = 0
    committed: int = 0
    events: int = 0
    answers: int = 0
    reported: float = 0.0
    """Steps times commit_len, as reported."""
    correct_drafts: int = 0
    proposed_drafts: int = 0
    metrics: dict[str, float] | None = None
    """Growth of the engine's families; None where they could not be read."""
    window: float | None = None


class Doubt(StrEnum):
    """Why figures cannot be trusted."""

    CONTRADICTION = "metrics count wrong"
    MISSING = "metrics miss steps"
    RESTART = "engine restarted"


def disagreement(totals: Totals) -> tuple[Doubt, str] | None:
    """How the figures disagree, in words; None if they agree, or there are none."""
    if not totals.steps:
        return None
    wrong = _answers(totals)
    if wrong:
        return Doubt.CONTRADICTION, wrong
    return None if totals.metrics is None else _counted(totals, totals.metrics)


def _answers(totals: Totals) -> str:
    tokens = totals.committed
    if not abs(totals.reported - tokens) <= 0.01 * tokens + 0.5:
        return (
            f"answers report {totals.reported / totals.steps:.2f} tokens a step, "
            f"their {tokens} tokens in {totals.steps} steps are {tokens / totals.steps:.2f}"
        )
    beyond = abs(totals.correct_drafts + totals.steps - tokens)
    if totals.correct_drafts and beyond > _CUT * totals.answers:
        return (
            f"{totals.correct_drafts} accepted drafts and {totals.steps} bonus tokens are not the "
            f"{tokens} tokens that came"
        )
    if totals.events > totals.steps + totals.answers:
        return f"{totals.events} events came of {totals.steps} steps, one at most of each"
    return ""


def _counted(totals: Totals, metrics: dict[str, float]) -> tuple[Doubt, str] | None:
    fell = [name for name, by in metrics.items() if by < 0 and name.endswith(_COUNTERS)]
    if fell:
        return Doubt.RESTART, f"{fell[0]} fell by {-metrics[fell[0]]:g} during the run"
    count, total, depth = (
        metrics.get(name, 0.0)
        for name in (
            *("longleaf_commit_len_count", "longleaf_commit_len_sum"),
            "longleaf_accepted_depth_sum",
        )
    )
    if depth != total - count:
        return Doubt.CONTRADICTION, (
            f"/metrics counts an accepted depth of {depth:g} beside {total:g} tokens in {count:g} "
            "steps: it must be their difference"
        )
    words = (
        f"/metrics counts {count:.0f} steps and {total:.0f} tokens, answers {totals.steps} and "
        f"{totals.committed}"
    )
    if total < totals.committed:
        return Doubt.MISSING, words
    return (Doubt.CONTRADICTION, words) if count < totals.steps else None
