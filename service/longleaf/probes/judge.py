"""From commit_len by text and context to an answer in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from longleaf.probes.lengths import label


class Verdict(StrEnum):
    """What decides commit_len here."""

    HEALTHY = "healthy"
    TEXT = "text"
    CONTEXT = "context"
    BOTH = "both"
    ENGINE = "engine"
    METRICS = "metrics"
    UNKNOWN = "unknown"

    @property
    def passed(self) -> bool:
        """Whether the system does what it should: that texts differ is no fault."""
        return self in {Verdict.HEALTHY, Verdict.TEXT}


@dataclass(slots=True)
class Cell:
    """Samples of one text at one context; ``why`` where there is none."""

    text: str
    context: int
    samples: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    why: str = ""

    @property
    def mean(self) -> float | None:
        """Mean commit_len."""
        return fmean(self.samples) if self.samples else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """Least and most."""
        return (min(self.samples), max(self.samples)) if self.samples else None


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


@dataclass(frozen=True, slots=True)
class Judgement:
    """``cause``: the fault, in a word or two, empty if there is none. ``words``: all of it."""

    verdict: Verdict
    cause: str
    words: str


_FALL = 0.7
"""A mean below this share of what it is compared with is low."""
_LEAST = 2.5
"""commit_len that predictable text reaches with any drafter that works."""

_CUT = 8
"""Drafts of an answer's last step that engines may count and its limit cuts off."""


def judge(cells: Sequence[Cell], totals: Totals) -> Judgement:
    """The answer. Metrics that disagree come first: nothing can be concluded from them."""
    known = {(cell.text, cell.context): cell.mean for cell in cells if cell.mean is not None}
    if not known:
        return Judgement(Verdict.UNKNOWN, "", "Nothing could be measured.")
    wrong = _miscounted(totals)
    if wrong:
        return Judgement(
            Verdict.METRICS,
            "metrics count wrong",
            f"The figures disagree with one another: {wrong}. Trust none of them.",
        )
    texts = list(dict.fromkeys(cell.text for cell in cells))
    easy = texts[0]
    contexts = sorted({context for text, context in known if text == easy})
    if not contexts:
        return Judgement(Verdict.UNKNOWN, "", f"No {easy} text could be measured.")
    first = contexts[0]
    base = known[easy, first]
    if totals.proposed_drafts and totals.correct_drafts == 0:
        return Judgement(
            Verdict.ENGINE,
            "accept commits one",
            f"{totals.steps} steps drafted {totals.proposed_drafts} tokens and not one was "
            "accepted, of whatever text: the accept loop commits the bonus token alone.",
        )
    if base < _LEAST:
        return Judgement(
            Verdict.ENGINE,
            "draft KV missing",
            f"Even {easy} text commits {base:.2f} tokens a step at {label(first)}, the shortest "
            "context, though some drafts are accepted: the drafter does not see its context "
            "(draft KV that is dropped or never written, wrong taps, or another model's drafter).",
        )
    low = [context for context in contexts if known[easy, context] < _FALL * base]
    hard = [
        text for text in texts[1:] if (text, first) in known and known[text, first] < _FALL * base
    ]
    by_text = _by_text(known, easy, hard, first, base)
    span = _span(totals)
    if not low and not (span is not None and _beyond(span, totals)):
        if hard:
            return Judgement(
                Verdict.TEXT, "", f"{by_text} Context does not matter: {_row(known, easy)}."
            )
        return Judgement(
            Verdict.HEALTHY, "", f"commit_len is high on every text: {_row(known, easy)}."
        )
    cause, why = _cause_of_context(totals, span, contexts, low)
    fall = "falls with the context" if low else "does not fall yet"
    return Judgement(
        Verdict.BOTH if hard else Verdict.CONTEXT,
        cause,
        f"commit_len of {easy} text {fall}: {_row(known, easy)}. {why} {by_text}".strip(),
    )


def _by_text(
    known: dict[tuple[str, int], float], easy: str, hard: list[str], first: int, base: float
) -> str:
    if not hard:
        return ""
    parts = ", ".join(f"{known[text, first]:.2f} on {text}" for text in hard)
    return f"The text decides: {base:.2f} on {easy}, {parts} at {label(first)}."


def _row(known: dict[tuple[str, int], float], text: str) -> str:
    found = sorted((context, mean) for (of, context), mean in known.items() if of == text)
    return ", ".join(f"{mean:.2f} at {label(context)}" for context, mean in found)


def _cause_of_context(
    totals: Totals, span: float | None, contexts: list[int], low: list[int]
) -> tuple[str, str]:
    if span is not None and _beyond(span, totals):
        return (
            "window ignored",
            f"The drafter's windowed layers read {span:.0f} context rows a draft, and their "
            f"window is {totals.window:.0f}: it is ignored.",
        )
    fine = max((context for context in contexts if context < low[0]), default=0)
    held = (
        f"The window holds ({span:.0f} of {totals.window:.0f} rows)"
        if span is not None and totals.window is not None
        else "The window could not be checked (no --metrics-url)"
    )
    return (
        "draft positions",
        f"{held}, so positions are wrong somewhere past {label(fine)} and up to {label(low[0])} "
        "tokens: rotary positions of the draft KV, or YaRN.",
    )


def _beyond(span: float, totals: Totals) -> bool:
    return totals.window is not None and span > totals.window + 0.5


def _span(totals: Totals) -> float | None:
    """Context rows of a draft, mean of the context bucket where they are most."""
    metrics, family = totals.metrics or {}, "longleaf_drafter_span_tokens"
    counts = {
        key.rpartition("@")[2]: count
        for key, count in metrics.items()
        if key.startswith(f"{family}_count@") and count
    }
    means = [metrics[f"{family}_sum@{bucket}"] / count for bucket, count in counts.items()]
    return max(means, default=None)


def _miscounted(totals: Totals) -> str:
    """How the figures disagree; empty if they agree."""
    if not totals.steps:
        return ""
    tokens = totals.committed
    if abs(totals.reported - tokens) > 0.01 * tokens + 0.5:
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
    return _against_metrics(totals)


def _against_metrics(totals: Totals) -> str:
    metrics = totals.metrics
    if metrics is None or not metrics.get("longleaf_commit_len_count"):
        return ""
    count, total = metrics["longleaf_commit_len_count"], metrics["longleaf_commit_len_sum"]
    depth = metrics.get("longleaf_accepted_depth_sum", 0.0)
    if depth != total - count:
        return (
            f"/metrics counts an accepted depth of {depth / count:.2f} beside a commit_len of "
            f"{total / count:.2f}: it must be one less"
        )
    if count < totals.steps or total < totals.committed:
        return (
            f"/metrics counts {count:.0f} steps and {total:.0f} tokens, answers {totals.steps} "
            f"and {totals.committed}"
        )
    return ""
