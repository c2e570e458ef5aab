"""A plan: who arrives when and asks what. Written in TOML, all of it drawn from one seed."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longleaf_load.arrivals import Phase
from longleaf_load.lengths import (
    Lengths,
    PlanError,
    lengths,
    positive,
    share,
    tokens,
    whole,
)
from longleaf_load.prompts import KINDS
from longleaf_load.trace import Traced, read_trace

APIS = ("chat", "completions")
_DAY = 86_400.0
_MOST_SECONDS = 30 * _DAY
_MOST_REQUESTS = 10_000_000
_LEAST_BURST, _MOST_BURST = 0.001, 100
_MOST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``timed``: the trace brings its own times, the one phase is as long as it is. ``even``:
    prompt lengths are spread evenly over the arrivals, not at random. ``api``: ``chat``, or
    ``completions`` with prompts of token ids. ``documents``: how many shared documents there are,
    ``document_share`` the part of sessions that ask about one. ``turns`` and ``think_seconds``: of
    a conversation. ``cancel_share``: clients that leave, half of them before the first token, after
    ``cancel_seconds`` on average. ``retries``: how often a refused client comes back, when it is
    told to.
    ``stop_below``: end after a phase in which less than this part of the requests meets the
    objective.
    """

    phases: tuple[Phase, ...]
    prompt: Lengths | None
    answer: Lengths
    trace: tuple[Traced, ...] = ()
    timed: bool = False
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
    cancel_seconds: float = 2.0
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
    "cancel": {"share", "seconds"},
}
_PHASE = {"name", "seconds", "rate", "end_rate", "burst"}


def load_plan(
    path: Path, rate_factor: float = 1.0, seed: int | None = None, longer: float = 1.0
) -> Plan:
    """Read a plan; ``rate_factor`` multiplies its rates, ``longer`` its phases' seconds.
    ``PlanError`` names the wrong field.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return parse_plan(values, path.parent, rate_factor, seed, longer)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise PlanError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise PlanError(f"{path}: nested too deep") from None


def parse_plan(
    values: Mapping[str, Any],
    folder: Path,
    rate_factor: float = 1.0,
    seed: int | None = None,
    longer: float = 1.0,
) -> Plan:
    """Check a plan's values; ``folder`` is where its trace lies."""
    positive(rate_factor, "--rate")
    positive(longer, "--longer")
    _check_names(values)
    prompts, documents = values.get("prompts", {}), values.get("documents", {})
    turns = values.get("turns", {})
    cancel = values.get("cancel", {})
    longest = tokens(prompts.get("longest", "185k"), "prompts.longest")
    trace = (
        read_trace(folder / _text(values["trace"], "trace"), longest) if "trace" in values else ()
    )
    if not trace and "length" not in prompts:
        raise PlanError("prompts.length is missing (or a trace)")
    api = values.get("api", "chat")
    if api not in APIS:
        raise PlanError(f"api must be one of {', '.join(APIS)}, got {api!r}")
    document_share = share(documents.get("share", 0.0), "documents.share")
    if document_share and "length" not in documents:
        raise PlanError("documents.length is missing")
    phases = _phases(values.get("phase", []), rate_factor, longer)
    timed = not phases
    if timed:
        phases = _trace_phase(trace, rate_factor, longer)
    _check_size(phases)
    plan = Plan(
        phases=phases,
        timed=timed,
        prompt=_prompts(prompts, "prompts.length", longest),
        answer=lengths(values.get("answers", {}).get("max_tokens", 128), "answers.max_tokens"),
        trace=trace,
        texts=_texts(prompts.get("texts", dict.fromkeys(KINDS, 1.0))),
        even=_flag(prompts.get("even", False), "prompts.even"),
        api=api,
        seed=whole(values.get("seed", 1) if seed is None else seed, "seed", 0, _MOST_SEED),
        documents=whole(documents.get("count", 4), "documents.count", 1, 1000),
        document=_prompts(documents, "documents.length", longest),
        document_share=document_share,
        turns=whole(turns.get("count", 1), "turns.count", 1, 1000),
        think_seconds=positive(turns.get("think_seconds", 1.0), "turns.think_seconds", _DAY),
        cancel_share=share(cancel.get("share", 0.0), "cancel.share"),
        cancel_seconds=positive(cancel.get("seconds", 2.0), "cancel.seconds", _DAY),
        retries=whole(values.get("retries", 0), "retries", 0, 1000),
        stop_below=share(values.get("stop_below", 0.0), "stop_below"),
        longest=longest,
        timeout_seconds=positive(values.get("timeout_seconds", 600.0), "timeout_seconds", _DAY),
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
    _check_known(values, _SECTIONS[""] | set(filter(None, _SECTIONS)), "", "a plan")
    for section, known in _SECTIONS.items():
        found = values.get(section, {})
        if not isinstance(found, Mapping):
            raise PlanError(f"{section} must be a table")
        _check_known(found, known, f"{section}.", section)


def _check_known(found: Mapping[str, Any], known: set[str], prefix: str, place: str) -> None:
    unknown = sorted(set(found) - known)
    if unknown:
        name = unknown[0]
        hint = f"; {name} goes at the top of the plan" if name in _SECTIONS[""] else ""
        raise PlanError(
            f"{prefix}{name} is not known; {place} has {', '.join(sorted(known))}{hint}"
        )


def _phases(rows: Any, factor: float, longer: float) -> tuple[Phase, ...]:
    if not isinstance(rows, list):
        raise PlanError("phase must be a list of tables, [[phase]]")
    phases = []
    for number, row in enumerate(rows):
        where = f"phase[{number}]"
        if not isinstance(row, Mapping):
            raise PlanError(f"{where} must be a table, [[phase]], got {row!r}")
        _check_known(row, _PHASE, f"{where}.", "a phase")
        rate = positive(row.get("rate"), f"{where}.rate") * factor
        end = positive(row["end_rate"], f"{where}.end_rate") * factor if "end_rate" in row else rate
        burst = row.get("burst", 1.0)
        if not _is_burst(burst):
            raise PlanError(
                f"{where}.burst must be 0 or between {_LEAST_BURST} and {_MOST_BURST}, "
                f"got {burst!r}"
            )
        seconds = positive(row.get("seconds"), f"{where}.seconds") * longer
        name = str(row.get("name", f"{end:g}/s"))
        phases.append(Phase(name, seconds, rate, end, float(burst)))
    return tuple(phases)


def _is_burst(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (value == 0 or _LEAST_BURST <= value <= _MOST_BURST)


def _check_size(phases: Sequence[Phase]) -> None:
    """Rates and seconds are each as they may be; so must be what comes of them and their factors
    (infinite, where they are beyond a float).
    """
    requests = sum(phase.expected for phase in phases)
    if not requests <= _MOST_REQUESTS:
        raise PlanError(
            f"phase: {requests:g} requests (rates and seconds, times --rate and --longer) "
            f"are more than {_MOST_REQUESTS:,}"
        )
    seconds = sum(phase.seconds for phase in phases)
    if not seconds <= _MOST_SECONDS:
        raise PlanError(
            f"phase: {seconds:g} seconds (times --longer) are more than {_MOST_SECONDS:,.0f} "
            "(30 days)"
        )


def _trace_phase(trace: Sequence[Traced], factor: float, longer: float) -> tuple[Phase, ...]:
    """A trace with times of its own is one phase, as long as it is."""
    times = [line.at for line in trace if line.at is not None]
    if len(times) != len(trace) or len(trace) < 2:
        raise PlanError("phase is missing (or a trace of at least two lines with timestamps)")
    seconds = max(max(times), 1e-3) * longer / factor
    return (Phase("trace", seconds, len(trace) / seconds, len(trace) / seconds),)


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
