"""A trace: who asked what, a line of JSON each."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longleaf_load.lengths import PlanError, whole
from longleaf_load.prompts import KINDS


@dataclass(frozen=True, slots=True)
class Traced:
    """One line of a trace. ``at``: seconds since its first line, None where it has no times.
    ``place``: file and line, for errors.
    """

    at: float | None
    prompt_tokens: int
    max_tokens: int | None
    text: str | None
    place: str


def read_trace(path: Path, longest: int) -> tuple[Traced, ...]:
    """JSONL: ``prompt_tokens`` (or ``input_length``), and where they are there ``max_tokens``
    (``output_length``), ``timestamp`` (milliseconds), ``text``. ``longest``: of the plan's
    prompts. ``PlanError`` names file, line and field.
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
        except RecursionError:
            raise PlanError(f"{where}: not valid JSON: nested too deep") from None
        if not isinstance(row, Mapping):
            raise PlanError(f"{where}: must be an object, got {row!r}")
        prompt = row.get("prompt_tokens", row.get("input_length"))
        answer = row.get("max_tokens", row.get("output_length"))
        at, kind = row.get("timestamp"), row.get("text")
        if kind is not None and kind not in KINDS:
            raise PlanError(f"{where}: text must be one of {', '.join(KINDS)}, got {kind!r}")
        if at is not None:
            at = _milliseconds(at, f"{where}: timestamp", lines[-1].at if lines else None)
        prompt = whole(prompt, f"{where}: prompt_tokens", 1)
        if prompt > longest:
            raise PlanError(
                f"{where}: prompt_tokens: {prompt} are more than prompts.longest, {longest}"
            )
        if answer is not None:
            answer = whole(answer, f"{where}: max_tokens", 1)
        lines.append(Traced(at, prompt, answer, kind, where))
    if not lines:
        raise PlanError(f"trace: {path}: no lines")
    first = lines[0].at or 0.0
    return tuple(one if one.at is None else replace(one, at=one.at - first) for one in lines)


def _milliseconds(value: Any, field: str, earlier: float | None) -> float:
    """Seconds, not before ``earlier``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max:
        raise PlanError(f"{field} must be a number of milliseconds, got {value!r}")
    if earlier is not None and value / 1e3 < earlier:
        raise PlanError(f"{field} must not be before the line above, got {value!r}")
    return float(value) / 1e3
