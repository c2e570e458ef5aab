"""A plan: who arrives when and asks what. Written in TOML, all of it drawn from one seed."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longleaf_load.arrivals import Phase
from longleaf_load.lengths import Lengths, PlanError, lengths, positive, share, tokens
from longleaf_load.prompts import KINDS

APIS = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class Traced:
    """One line of a trace. ``at``: seconds since its first line, None where it has no times."""

    at: float | None
    prompt_tokens: int
    max_tokens: int | None
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``even``: prompt lengths are spread evenly over the arrivals, not at random. ``api``:
    ``chat``, or ``completions`` with prompts of token ids. ``documents``: how many shared documents
    there are, ``document_share`` the part of sessions that ask about one. ``turns`` and
    ``think_seconds``: of a conversation. ``cancel_share``: clients that leave, half of them before
    the first token. ``retries``: how often a refused client comes back, when it is told to.
    ``stop_below``: end after a phase in which less than this part of the requests meets the
    objective.
    """

    phases: tuple[Phase, ...]
    prompt: Lengths | None
    answer: Lengths
    trace: tuple[Traced, ...] = ()
    texts: tuple[tuple[str, float], ...] = tuple((kind, 1.0) for kind in KINDS)
    even: bool = False
    api: str = "chat"
    seed: int = 1
    documents: int = 4
    document: Lengths | None = None
    document_share: float = 0.0
    turns: int = 1
    think_seconds: float = 1.0
    cancel_share: float = 0.0
    retries: int = 0
    stop_below: float = 0.0
    longest: int = 185_000
    timeout_seconds: float = 600.0

    @property
    def seconds(self) -> float:
        """How long arrivals go on."""
        return sum(phase.seconds for phase in self.phases)


_SECTIONS = {
    "": {"seed", "api", "retries", "stop_below", "timeout_seconds", "trace", "phase"},
    "prompts": {"length", "longest", "texts", "even"},
    "answers": {"max_tokens"},
    "documents": {"count", "length", "share"},
    "turns": {"count", "think_seconds"},
    "cancel": {"share"},
}


def load_plan(
    path: Path, rate_factor: float = 1.0, seed: int | None = None, longer: float = 1.0
) -> Plan:
    """Read a plan; ``rate_factor`` multiplies its rates, ``longer`` its phases' seconds.
    ``PlanError`` names the wrong field.
    """
    positive(rate_factor, "--rate")
    positive(longer, "--longer")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise PlanError(f"{path}: not valid TOML: {error}") from None
    try:
        plan = parse_plan(values, path.parent, rate_factor, seed)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    phases = tuple(replace(phase, seconds=phase.seconds * longer) for phase in plan.phases)
    return replace(plan, phases=phases)


def parse_plan(
    values: Mapping[str, Any], folder: Path, rate_factor: float = 1.0, seed: int | None = None
) -> Plan:
    """Check a plan's values; ``folder`` is where its trace lies."""
    _check_names(values)
    prompts, documents = values.get("prompts", {}), values.get("documents", {})
    turns = values.get("turns", {})
    trace = _trace(folder / _text(values["trace"], "trace")) if "trace" in values else ()
    if not trace and "length" not in prompts:
        raise PlanError("prompts.length is missing (or a trace)")
    api = values.get("api", "chat")
    if api not in APIS:
        raise PlanError(f"api must be one of {', '.join(APIS)}, got {api!r}")
    document_share = share(documents.get("share", 0.0), "documents.share")
    if document_share and "length" not in documents:
        raise PlanError("documents.length is missing")
    phases = _phases(values.get("phase", []), rate_factor)
    if not phases:
        phases = _trace_phase(trace, rate_factor)
    longest = tokens(prompts.get("longest", "185k"), "prompts.longest")
    plan = Plan(
        phases=phases,
        prompt=_prompts(prompts, "prompts.length", longest),
        answer=lengths(values.get("answers", {}).get("max_tokens", 128), "answers.max_tokens"),
        trace=trace,
        texts=_texts(prompts.get("texts", dict.fromkeys(KINDS, 1.0))),
        even=_flag(prompts.get("even", False), "prompts.even"),
        api=api,
        seed=_count(values.get("seed", 1) if seed is None else seed, "seed", 0),
        documents=_count(documents.get("count", 4), "documents.count", 1),
        document=_prompts(documents, "documents.length", longest),
        document_share=document_share,
        turns=_count(turns.get("count", 1), "turns.count", 1),
        think_seconds=positive(turns.get("think_seconds", 1.0), "turns.think_seconds"),
        cancel_share=share(values.get("cancel", {}).get("share", 0.0), "cancel.share"),
        retries=_count(values.get("retries", 0), "retries", 0),
        stop_below=share(values.get("stop_below", 0.0), "stop_below"),
        longest=longest,
        timeout_seconds=positive(values.get("timeout_seconds", 600.0), "timeout_seconds"),
    )
    if plan.api != "chat" and (plan.document_share or plan.turns > 1):
        field = "documents.share" if plan.document_share else "turns.count"
        raise PlanError(f"{field} needs messages: api must be chat, got {plan.api!r}")
    return plan


def _prompts(values: Mapping[str, Any], field: str, longest: int) -> Lengths | None:
    """The distribution ``length`` of a section, none of it beyond the longest prompt."""
    if "length" not in values:
        return None
    found = lengths(values["length"], field)
    if found.most > longest:
        raise PlanError(f"{field}: {found.most} tokens are more than prompts.longest, {longest}")
    return found


def _check_names(values: Mapping[str, Any]) -> None:
    for section, known in _SECTIONS.items():
        found = values.get(section, {}) if section else values
        if not isinstance(found, Mapping):
            raise PlanError(f"{section} must be a table")
        unknown = sorted(set(found) - known - (set(_SECTIONS) if not section else set()))
        if unknown:
            name = f"{section}.{unknown[0]}" if section else unknown[0]
            raise PlanError(
                f"{name} is not known; {section or 'a plan'} has {', '.join(sorted(known))}"
            )


def _phases(rows: Any, factor: float) -> tuple[Phase, ...]:
    if not isinstance(rows, list):
        raise PlanError("phase must be a list of tables, [[phase]]")
    phases = []
    for number, row in enumerate(rows):
        where = f"phase[{number}]"
        if not isinstance(row, Mapping):
            raise PlanError(f"{where} must be a table, [[phase]], got {row!r}")
        unknown = sorted(set(row) - {"name", "seconds", "rate", "end_rate", "burst"})
        if unknown:
            raise PlanError(f"{where}.{unknown[0]} is not known")
        rate = positive(row.get("rate"), f"{where}.rate") * factor
        end = positive(row["end_rate"], f"{where}.end_rate") * factor if "end_rate" in row else rate
        burst = row.get("burst", 1.0)
        if isinstance(burst, bool) or not isinstance(burst, int | float) or not 0 <= burst <= 100:
            raise PlanError(f"{where}.burst must be between 0 and 100, got {burst!r}")
        seconds = positive(row.get("seconds"), f"{where}.seconds")
        name = str(row.get("name", f"{end:g}/s"))
        phases.append(Phase(name, seconds, rate, end, float(burst)))
    return tuple(phases)


def _trace_phase(trace: Sequence[Traced], factor: float) -> tuple[Phase, ...]:
    """A trace with times of its own is one phase, as long as it is."""
    times = [line.at for line in trace if line.at is not None]
    if len(times) != len(trace) or len(trace) < 2:
        raise PlanError("phase is missing (or a trace of at least two lines with timestamps)")
    seconds = max(max(times), 1e-3) / factor
    return (Phase("trace", seconds, len(trace) / seconds, len(trace) / seconds),)


def _trace(path: Path) -> tuple[Traced, ...]:
    """JSONL: ``prompt_tokens`` (or ``input_length``), and where they are there ``max_tokens``
    (``output_length``), ``timestamp`` (milliseconds), ``text``.
    """
    lines: list[Traced] = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"trace: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"trace: {path}: not UTF-8: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"trace: {path.name}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PlanError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, Mapping):
            raise PlanError(f"{where}: must be an object, got {row!r}")
        prompt = row.get("prompt_tokens", row.get("input_length"))
        answer = row.get("max_tokens", row.get("output_length"))
        at, kind = row.get("timestamp"), row.get("text")
        if kind is not None and kind not in KINDS:
            raise PlanError(f"{where}: text must be one of {', '.join(KINDS)}, got {kind!r}")
        if at is not None:
            at = _milliseconds(at, f"{where}: timestamp", lines[-1].at if lines else None)
        lines.append(
            Traced(
                at,
                _count(prompt, f"{where}: prompt_tokens", 1),
                None if answer is None else _count(answer, f"{where}: max_tokens", 1),
                kind,
            )
        )
    if not lines:
        raise PlanError(f"trace: {path}: no lines")
    first = lines[0].at or 0.0
    return tuple(
        Traced(
            None if one.at is None else one.at - first, one.prompt_tokens, one.max_tokens, one.text
        )
        for one in lines
    )


def _milliseconds(value: Any, field: str, earlier: float | None) -> float:
    """Seconds, not before ``earlier``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PlanError(f"{field} must be a number of milliseconds, got {value!r}")
    if earlier is not None and value / 1e3 < earlier:
        raise PlanError(f"{field} must not be before the line above, got {value!r}")
    return value / 1e3


def _texts(values: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(values, Mapping) or not values or set(values) - set(KINDS):
        raise PlanError(f"prompts.texts must give shares to {', '.join(KINDS)}, got {values!r}")
    return tuple((kind, positive(part, f"prompts.texts.{kind}")) for kind, part in values.items())


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{field} must be a string, got {value!r}")
    return value


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{field} must be true or false, got {value!r}")
    return value


def _count(value: Any, field: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{field} must be a whole number of at least {least}, got {value!r}")
    return value
