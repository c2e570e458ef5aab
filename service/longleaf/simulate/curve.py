"""A recorded step-time curve: how long an engine's decode steps and prefill forwards take."""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CURVES = Path(__file__).parent / "curves"
"""Where the package keeps the curves that were recorded for it."""

_MOST = 1e15
_LONGEST_NAME = 64


class CurveError(ValueError):
    """A curve's file is missing a field or holds a bad value; the message names both."""


@dataclass(frozen=True, slots=True)
class Line:
    """Straight lines between points, drawn on beyond the first and the last one.

    ``xs`` rise strictly.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        """The value at ``x``; a single point is a constant."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        left = right - 1
        share = (x - xs[left]) / (xs[right] - xs[left])
        return ys[left] + share * (ys[right] - ys[left])


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of steps and prefill forwards, as recorded on one machine.

    ``steps``: for each recorded batch (sequences), seconds against the mean context of its
    sequences (tokens). ``prefill``: seconds from an empty cache to a context (tokens).
    ``shortest``: the shortest prefill forward that was recorded. ``nodes``: rows that a step
    verifies for each sequence.
    """

    name: str
    source: Mapping[str, Any]
    nodes: int
    kv_bytes_per_token: float
    steps: tuple[tuple[int, Line], ...]
    prefill: Line
    shortest: float

    @property
    def largest_batch(self) -> int:
        """Beyond it step times are extrapolated."""
        return self.steps[-1][0]

    @property
    def longest_context(self) -> int:
        """Beyond it step times are extrapolated."""
        return int(max(line.xs[-1] for _, line in self.steps))

    def beyond(self, batch: float, context: int) -> list[str]:
        """What is extrapolated for batches and contexts up to these, in words."""
        told = []
        if batch > self.largest_batch:
            told.append(
                f"the curve was recorded up to batch {self.largest_batch}: beyond, attention adds "
                "up and the rest of a step is taken as shared, which flatters experts"
            )
        if context > self.longest_context:
            told.append(f"the curve was recorded up to {self.longest_context} tokens of context")
        return told

    def step_seconds(self, contexts: Sequence[int]) -> float:
        """One decode step of sequences with ``contexts`` tokens each.

        Linear between the recorded batches. Beyond the largest: what grows with context adds up
        over the sequences, the rest is shared (which flatters experts: more sequences use more).
        """
        batch, mean = len(contexts), sum(contexts) / len(contexts)
        below = [entry for entry in self.steps if entry[0] <= batch]
        above = [entry for entry in self.steps if entry[0] > batch]
        if not below:
            return max(0.0, above[0][1].at(mean))
        size, line = below[-1]
        seconds = line.at(mean)
        if above:
            next_size, next_line = above[0]
            share = (batch - size) / (next_size - size)
            return max(0.0, seconds + share * (next_line.at(mean) - seconds))
        return max(0.0, seconds + (batch - size) * max(0.0, seconds - line.at(0)) / size)

    def prefill_seconds(self, spans: Sequence[tuple[int, int]]) -> float:
        """One forward over the tokens from ``start`` to ``end`` of each span."""
        seconds = sum(self.prefill.at(end) - self.prefill.at(start) for start, end in spans)
        return max(self.shortest, seconds)

    def prompt_seconds(self, tokens: int, cached: int = 0) -> float:
        """All of a prompt's prefill, ``cached`` tokens of which are there already."""
        return max(self.shortest, self.prefill.at(tokens) - self.prefill.at(cached))


def load_curve(name: str) -> Curve:
    """Read a curve of the package by its name, or a file by its path. ``CurveError``."""
    path = Path(name)
    if not name.endswith(".json"):
        path = CURVES / f"{name}.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in CURVES.glob("*.json")))
        raise CurveError(f"no curve {name!r}: give a file (….json) or one of {known}") from None
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CurveError(f"{path}: not valid JSON: {error}") from None
    return parse_curve(values, str(path))


def parse_curve(values: Any, source: str) -> Curve:
    """Check a curve's JSON object; ``source`` names it in errors."""
    if not isinstance(values, dict):
        raise CurveError(f"{source}: must hold a JSON object")
    batches: dict[int, dict[float, float]] = {}
    for row in _rows(values, "steps", source):
        batch = int(_number(row, "batch", f"{source}: steps", 1))
        context = _number(row, "context", f"{source}: steps", 0)
        points = batches.setdefault(batch, {})
        if context in points:
            raise CurveError(f"{source}: steps: two of context {context:g} and batch {batch}")
        points[context] = _number(row, "seconds", f"{source}: steps", 0)
    if not any(seconds for points in batches.values() for seconds in points.values()):
        raise CurveError(f"{source}: steps: seconds must not all be 0")
    total: dict[float, float] = {0.0: 0.0}
    forwards: list[float] = []
    for row in sorted(
        _rows(values, "prefill", source),
        key=lambda row: _number(row, "context", f"{source}: prefill", 1),
    ):
        context = _number(row, "context", f"{source}: prefill", 1)
        cached = _number(row, "cached", f"{source}: prefill", 0)
        seconds = _number(row, "seconds", f"{source}: prefill", 0)
        if cached >= context:
            raise CurveError(
                f"{source}: prefill: cached must be less than context {context:g}, got {cached:g}"
            )
        if context in total:
            raise CurveError(f"{source}: prefill: two of context {context:g}")
        forwards.append(seconds)
        total[context] = _line(total).at(cached) + seconds
    if not any(forwards):
        raise CurveError(f"{source}: prefill: seconds must not all be 0")
    return Curve(
        name=_name(values, source),
        source={
            key: value
            for key, value in values.items()
            if key not in {"steps", "prefill", "nodes", "kv_bytes_per_token"}
        },
        nodes=int(_number(values, "nodes", source, 1)),
        kv_bytes_per_token=_number(values, "kv_bytes_per_token", source, 1),
        steps=tuple((batch, _line(points)) for batch, points in sorted(batches.items())),
        prefill=_line(total),
        shortest=min(forwards),
    )


def _line(points: Mapping[float, float]) -> Line:
    return Line(*(tuple(side) for side in zip(*sorted(points.items()), strict=True)))


def _field(values: Mapping[str, Any], name: str, source: str) -> Any:
    if values.get(name) is None:
        raise CurveError(f"{source}: {name} is missing")
    return values[name]


def _name(values: Mapping[str, Any], source: str) -> str:
    """It stands in a header of every answer and in a label of every metric."""
    name = _field(values, "name", source)
    right = isinstance(name, str) and name.isascii() and name.isprintable()
    if not right or not 0 < len(name) <= _LONGEST_NAME or set(name) & set("\"'"):
        raise CurveError(
            f"{source}: name must be 1 to {_LONGEST_NAME} printable ASCII characters without "
            f"quotes, got {ascii(name)[: _LONGEST_NAME + 16]}"
        )
    return str(name)


def _rows(values: Mapping[str, Any], name: str, source: str) -> list[Mapping[str, Any]]:
    rows = _field(values, name, source)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise CurveError(f"{source}: {name} must be a list of at least one object")
    return rows


def _number(values: Mapping[str, Any], name: str, source: str, least: float) -> float:
    value = _field(values, name, source)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CurveError(f"{source}: {name} must be a finite number, got {value!r}")
    if not abs(value) <= _MOST:
        raise CurveError(f"{source}: {name} must be a finite number of at most {_MOST:g}")
    if value < least:
        raise CurveError(f"{source}: {name} must be at least {least:g}, got {value:g}")
    return float(value)
