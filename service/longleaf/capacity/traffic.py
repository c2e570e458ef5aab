"""A traffic mix: kinds of requests and their shares."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longleaf.token_counts import MOST_TOKENS, parse_tokens

_MOST_SHARE = 1e9


class TrafficError(ValueError):
    """A mix says something that cannot be; the message names the field."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind; ``share`` of all of them, lengths in tokens. ``cached_tokens`` of the
    prompt are in a prefix cache already.
    """

    share: float
    prompt_tokens: int
    answer_tokens: int
    text: str = "prose"
    cached_tokens: int = 0

    @property
    def uncached_tokens(self) -> int:
        """Of the prompt: what prefill computes."""
        return self.prompt_tokens - self.cached_tokens

    def __str__(self) -> str:
        cached = ""
        if self.cached_tokens:
            cached = f" ({self.cached_tokens} cached, {self.uncached_tokens} to compute)"
        return f"{self.prompt_tokens} tokens{cached}"


def parse_kind(word: str) -> Kind:
    """``SHARE:PROMPT[+CACHED]:ANSWER[:TEXT]``, such as ``0.1:185k+160k:256:code``: k is 1,024
    tokens, but the contexts that are named by round numbers are those: 185k is 185,000, 200k is
    200,000.
    """
    parts = word.split(":")
    if len(parts) not in {3, 4}:
        raise TrafficError(f"--mix {word!r} is not SHARE:PROMPT[+CACHED]:ANSWER[:TEXT]")
    prompt, _, cached = parts[1].partition("+")
    return _checked(
        {
            "share": _number(parts[0], "share"),
            "prompt_tokens": _tokens(prompt, "prompt"),
            "answer_tokens": _tokens(parts[2], "answer"),
            "cached_tokens": _tokens(cached, "cached") if cached else 0,
            **({"text": parts[3]} if len(parts) == 4 else {}),
        },
        f"--mix {word!r}",
    )


def load_kinds(path: Path) -> list[Kind]:
    """Read a JSON list of objects with ``Kind``'s fields."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TrafficError(f"{path}: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise TrafficError(f"{path} must hold a list of at least one kind of request")
    return [_checked(row, f"{path}[{number}]") for number, row in enumerate(rows)]


def normalized(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """The same with shares that add up to 1."""
    total = sum(kind.share for kind in kinds)
    return tuple(
        Kind(k.share / total, k.prompt_tokens, k.answer_tokens, k.text, k.cached_tokens)
        for k in kinds
    )


def _checked(row: Any, source: str) -> Kind:
    if not isinstance(row, Mapping):
        raise TrafficError(f"{source} must be an object")
    unknown = sorted(set(row) - set(Kind.__slots__))
    if unknown:
        raise TrafficError(f"{source}: {unknown[0]} is not known")
    share = row.get("share")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
        raise TrafficError(f"{source}: share must be above 0, got {share!r}")
    if share > _MOST_SHARE:
        raise TrafficError(f"{source}: share must be at most {_MOST_SHARE:g}")
    for name in ("prompt_tokens", "answer_tokens"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TrafficError(f"{source}: {name} must be a whole number above 0, got {value!r}")
        if value > MOST_TOKENS:
            raise TrafficError(f"{source}: {name} must be at most {MOST_TOKENS:,}")
    prompt, cached = row["prompt_tokens"], row.get("cached_tokens", 0)
    if isinstance(cached, bool) or not isinstance(cached, int) or not 0 <= cached < prompt:
        raise TrafficError(
            f"{source}: cached_tokens must be a whole number less than prompt_tokens ({prompt})"
        )
    if not isinstance(row.get("text", ""), str):
        raise TrafficError(f"{source}: text must be a string, got {row['text']!r}")
    return Kind(**row)


def _tokens(word: str, field: str) -> int:
    number = parse_tokens(word)
    if number is None:
        raise TrafficError(f"--mix: {field} {word!r} is no number of tokens such as 512 or 16k")
    return number


def _number(word: str, field: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TrafficError(f"--mix: {field} must be a number, got {word!r}")
    return value
