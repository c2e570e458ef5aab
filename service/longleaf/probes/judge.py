"""From commit_len by text and context to an answer in words.

The reference is always ``predictable`` text, which any drafter gets right: other texts are held
to themselves. A cell that was not measured is never a pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from longleaf.probes.accounting import Doubt, Totals, disagreement
from longleaf.probes.lengths import label
from longleaf.probes.texts import REFERENCE


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
    """Samples of one text at one context; ``why`` where some or all are missing."""

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


@dataclass(frozen=True, slots=True)
class Judgement:
    """``cause``: the fault, in a word or two, empty if there is none. ``words``: all of it."""

    verdict: Verdict
    cause: str
    words: str


_LOW = 0.7
"""A mean below this share of what it is compared with is low."""
_FALLEN = 0.5
"""Any sample below this share is low, and every sample of a text that is harder here and easier
there; of those, fewer than ``_ENOUGH`` must be below ``_FAR_FALLEN``: sound engines commit from 2.1
to 5.7 tokens of one kind of prose.
"""
_FAR_FALLEN = 1 / 3
_ENOUGH = 3
_LEAST = 2.5
"""commit_len that predictable text reaches with any drafter that works, and may draft so far."""


def judge(cells: Sequence[Cell], totals: Totals) -> Judgement:
    """The answer. Figures that disagree come first: nothing can be concluded from them."""
    rows, missing = _rows(cells), unmeasured(cells)
    if not rows:
        why = f" ({missing[0]})" if missing else ""
        return Judgement(Verdict.UNKNOWN, "", f"Nothing could be measured{why}.")
    doubt = disagreement(totals)
    if doubt is not None:
        return _doubted(*doubt)
    if REFERENCE not in rows:
        return Judgement(
            Verdict.UNKNOWN,
            "",
            f"No {REFERENCE} text was measured: without it a fault cannot be told from the text.",
        )
    found = _no_drafts(rows[REFERENCE], totals) or _judged(rows, totals)
    if missing and found.verdict.passed:
        return Judgement(
            Verdict.UNKNOWN, "not measured", f"{missing[0]}. Of the rest: {found.words}"
        )
    return found


def unmeasured(cells: Sequence[Cell]) -> list[str]:
    """What lacks samples, with the reason."""
    return [
        f"{cell.text} {label(cell.context)}: {cell.why or 'not measured'}"
        for cell in cells
        if cell.why or not cell.samples
    ]


class _Row:
    """The measured cells of a text, by context."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        measured = sorted((cell for cell in cells if cell.samples), key=lambda cell: cell.context)
        self.text = measured[0].text
        self.contexts = [cell.context for cell in measured]
        self.counts = [len(cell.samples) for cell in measured]
        self.means = [fmean(cell.samples) for cell in measured]
        self.least = [min(cell.samples) for cell in measured]
        self.most = [max(cell.samples) for cell in measured]

    @property
    def best(self) -> float:
        """The best mean: what this text can reach here."""
        return max(self.means)

    def fallen(self) -> list[int]:
        """Contexts at which less is committed, beyond what the text alone explains."""
        if self.text == REFERENCE:
            base = self.best
            return self._where(
                mean < _LOW * base or least < _FALLEN * base
                for mean, least in zip(self.means, self.least, strict=True)
            )
        share = _FALLEN if min(self.counts) >= _ENOUGH else _FAR_FALLEN
        base = self.least[0] if self.least[0] > _LEAST else 0.0
        return self._where(most < share * base for most in self.most)

    def _where(self, found: Iterable[bool]) -> list[int]:
        return [context for context, is_it in zip(self.contexts, found, strict=True) if is_it]

    def __str__(self) -> str:
        return f"{self.text} " + ", ".join(
            f"{mean:.2f} at {label(context)}" + (f" ({least:.2f} to {most:.2f})" * (least < most))
            for context, mean, least, most in zip(
                self.contexts, self.means, self.least, self.most, strict=True
            )
        )


def _rows(cells: Sequence[Cell]) -> dict[str, _Row]:
    texts = dict.fromkeys(cell.text for cell in cells if cell.samples)
    return {text: _Row([cell for cell in cells if cell.text == text]) for text in texts}


def _doubted(doubt: Doubt, words: str) -> Judgement:
    if doubt is Doubt.RESTART:
        return Judgement(
            Verdict.UNKNOWN, doubt, f"An engine restarted ({words}): nothing can be concluded."
        )
    if doubt is Doubt.MISSING:
        return Judgement(
            Verdict.METRICS,
            doubt,
            f"{words}. Either they are not counted, or other replicas than --metrics-url's gave "
            "some of the answers, or it restarted.",
        )
    return Judgement(
        Verdict.METRICS, doubt, f"The figures disagree with one another: {words}. Trust none."
    )


def _no_drafts(reference: _Row, totals: Totals) -> Judgement | None:
    """Faults that the shortest context shows already."""
    at, mean = label(reference.contexts[0]), reference.means[0]
    least, most = reference.least[0], reference.most[0]
    drafted = totals.proposed_drafts / totals.steps if totals.proposed_drafts else None
    if drafted is not None and totals.correct_drafts == 0:
        return Judgement(
            Verdict.ENGINE,
            "accept commits one",
            f"{totals.steps} steps drafted {totals.proposed_drafts} tokens and not one was "
            "accepted, of whatever text: the accept loop commits the bonus token alone.",
        )
    if drafted is None and totals.steps and totals.committed <= totals.steps:
        return Judgement(
            Verdict.ENGINE,
            "nothing drafted",
            f"{totals.steps} steps committed a token each, and no drafts are told: speculation is "
            "off, or its drafter proposes nothing.",
        )
    if mean < (_LEAST if drafted is None else min(_LEAST, 1 + drafted / 2)):
        told = "" if drafted is None else f" of {drafted:.1f} drafted"
        return Judgement(
            Verdict.ENGINE,
            "draft KV missing",
            f"Even {REFERENCE} text commits {mean:.2f} tokens a step{told} at {at}, the shortest "
            "context: the drafter does not see its context (draft KV that is dropped or never "
            "written, wrong taps, or another model's drafter).",
        )
    if least < _FALLEN * most or mean < _LOW * reference.best:
        return Judgement(
            Verdict.ENGINE,
            "unsteady",
            f"At {at} already, the shortest context, one passage commits less than another, or "
            f"than at longer ones: {reference}.",
        )
    return None


def _judged(rows: dict[str, _Row], totals: Totals) -> Judgement:
    reference = rows[REFERENCE]
    fallen = {text: row.fallen() for text, row in rows.items()}
    low = _LOW * reference.best
    hard = [row for row in rows.values() if row is not reference and not fallen[row.text]]
    hard = [row for row in hard if min(row.means) < low]
    by_text = f"The text decides: {reference}; {'; '.join(map(str, hard))}." if hard else ""
    span = _span(totals)
    unchecked = _unchecked(span, totals)
    if not any(fallen.values()) and not _beyond(span, totals):
        several = len(reference.contexts) > 1
        context = "Context does not matter." if several else "One context only, others may differ."
        if hard:
            return Judgement(Verdict.TEXT, "", f"{by_text} {context}{unchecked}")
        every = "; ".join(map(str, rows.values()))
        return Judgement(
            Verdict.HEALTHY, "", f"commit_len is high on every text: {every}. {context}{unchecked}"
        )
    cause, why = _cause(totals, span, reference, fallen[REFERENCE])
    falls = "; ".join(str(rows[text]) for text in rows if fallen[text])
    what = f"commit_len falls with the context: {falls}." if falls else "It does not fall yet."
    return Judgement(
        Verdict.BOTH if hard else Verdict.CONTEXT, cause, f"{what} {why} {by_text}".strip()
    )


def _cause(totals: Totals, span: float | None, reference: _Row, low: list[int]) -> tuple[str, str]:
    if span is not None and _beyond(span, totals):
        return (
            "window ignored",
            f"The drafter's windowed layers read {span:.0f} context rows a draft, and their "
            f"window is {totals.window:.0f}: it is ignored.",
        )
    if not low:
        return (
            "far context",
            f"{reference} holds, for it is drafted from what is near: what is far is drafted "
            "badly (draft KV that is lost, its positions, or a window that is too short).",
        )
    fine = max((context for context in reference.contexts if context < low[0]), default=0)
    where = f"past {label(fine)} and up to {label(low[0])} tokens"
    positions = "the draft KV's rotary positions are wrong, or YaRN"
    if span is None or totals.window is None:
        return (
            "window or positions",
            f"Somewhere {where} either the drafter's window is ignored or {positions}: "
            "--metrics-url of the engine tells them apart.",
        )
    held = f"The window holds ({span:.0f} of {totals.window:.0f} rows)"
    return "draft positions", f"{held}, so somewhere {where} {positions}."


def _unchecked(span: float | None, totals: Totals) -> str:
    if span is not None and totals.window is not None:
        return ""
    why = "no metrics" if totals.metrics is None else "the engine tells none"
    return f" The drafter's window was not checked ({why})."


def _beyond(span: float | None, totals: Totals) -> bool:
    return span is not None and totals.window is not None and span > totals.window + 0.5


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
