"""Lengths in tokens, drawn from a distribution that a plan writes in words."""

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, TypeAlias

from longleaf.token_counts import MOST_TOKENS, parse_tokens

_FORMS = (
    "2k, 'uniform 1k 8k', 'log_uniform 1k 185k', 'lognormal 4k 1.0' (median, sigma), "
    "or a list of {share, length}"
)

Draw: TypeAlias = Callable[[random.Random], int]
"""Draws one length."""


class PlanError(ValueError):
    """A plan says something that cannot be done; the message names the field."""


def tokens(text: str | int, field: str) -> int:
    """A number of tokens, as ``parse_tokens`` reads it."""
    if isinstance(text, int) and not isinstance(text, bool):
        number = text
    elif (parsed := parse_tokens(str(text))) is not None:
        number = parsed
    else:
        raise PlanError(f"{field}: {text!r} is no number of tokens such as 512 or 16k")
    if not 1 <= number <= MOST_TOKENS:
        raise PlanError(f"{field} must be between 1 and {MOST_TOKENS:,} tokens, got {number}")
    return number


_GOLDEN = (math.sqrt(5) - 1) / 2


class Even(random.Random):
    """Its first number is the ``number``-th of a sequence that fills 0 to 1 evenly, so that few
    draws of a distribution look like many.
    """

    def __init__(self, seed: int, number: int) -> None:
        super().__init__(f"even {seed} {number}")
        start = random.Random(f"even {seed}").random()
        self._first: float | None = (start + number * _GOLDEN) % 1.0

    def random(self) -> float:
        """The even one, then any."""
        first, self._first = self._first, None
        return super().random() if first is None else first


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution, with what the plan calls it. ``least`` and ``most``: the shortest and the
    longest that were written down.
    """

    words: str
    draw: Draw = dataclass_field(repr=False, compare=False)
    least: int
    most: int


def lengths(value: Any, field: str) -> Lengths:
    """Read a distribution. ``PlanError`` lists the forms."""
    if isinstance(value, int):
        value = str(value)
    if isinstance(value, list):
        return _mixture(value, field)
    if not isinstance(value, str):
        raise PlanError(f"{field}: {value!r} is no distribution of lengths: {_FORMS}")
    kind, *rest = value.split() or [""]
    if not rest:
        fixed = tokens(kind, field)
        return Lengths(value, lambda _: fixed, fixed, fixed)
    if len(rest) != 2 or kind not in {"uniform", "log_uniform", "lognormal"}:
        raise PlanError(f"{field}: {value!r} is no distribution of lengths: {_FORMS}")
    low = tokens(rest[0], field)
    if kind == "lognormal":
        return Lengths(value, _lognormal(low, _sigma(rest[1], field)), low, low)
    high = tokens(rest[1], field)
    if high < low:
        raise PlanError(f"{field}: {value!r}: the second length is less than the first")
    if kind == "uniform":
        return Lengths(value, lambda random_: random_.randint(low, high), low, high)
    return Lengths(
        value,
        lambda random_: round(math.exp(random_.uniform(math.log(low), math.log(high)))),
        low,
        high,
    )


def _lognormal(median: int, sigma: float) -> Draw:
    return lambda random_: max(1, round(median * math.exp(random_.gauss(0.0, sigma))))


def _sigma(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 5:
        raise PlanError(f"{field}: sigma must be between 0 and 5, got {text}")
    return value


def _mixture(parts: Sequence[Any], field: str) -> Lengths:
    shares, members = [], []
    for number, part in enumerate(parts):
        where = f"{field}[{number}]"
        if not isinstance(part, Mapping) or set(part) != {"share", "length"}:
            raise PlanError(f"{where} must have share and length")
        shares.append(positive(part["share"], f"{where}.share"))
        members.append(lengths(part["length"], f"{where}.length"))
    if not members:
        raise PlanError(f"{field} must have at least one part")
    words = ", ".join(
        f"{share:g} of {one.words}" for share, one in zip(shares, members, strict=True)
    )
    return Lengths(
        words,
        lambda random_: random_.choices(members, shares)[0].draw(random_),
        min(member.least for member in members),
        max(member.most for member in members),
    )


def positive(value: Any, field: str, most: float = sys.float_info.max) -> float:
    """A number above 0, up to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        limit = "" if most == sys.float_info.max else f", up to {most:,.0f}"
        raise PlanError(f"{field} must be a number above 0{limit}, got {value!r}")
    return float(value)


def share(value: Any, field: str) -> float:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise PlanError(f"{field} must be between 0 and 1, got {value!r}")
    return float(value)


def whole(value: Any, field: str, least: int, most: int = MOST_TOKENS) -> int:
    """A whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlanError(f"{field} must be a whole number from {least} to {most:,}, got {value!r}")
    return value
