"""How many tokens steps commit: recorded distributions by kind of text."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_COMMITS = Path(__file__).parent / "commit_len.json"
"""Recorded with the tiny models of this package."""


_MOST_STEPS = 10**15


class CommitsError(ValueError):
    """A file of distributions is missing a field or holds a bad value."""


@dataclass(frozen=True, slots=True)
class CommitLengths:
    """``cumulative``: for each kind of text, the share of steps that accept at most 0, 1, 2, …
    drafted tokens: float64 [drafts + 1], the last one 1.
    """

    cumulative: Mapping[str, NDArray[np.float64]]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of text."""
        return tuple(self.cumulative)

    def drafts(self, kind: str, uniform: float) -> int:
        """Accepted drafts of one step, from a uniform in [0, 1)."""
        return int(np.searchsorted(self.cumulative[kind], uniform, side="right"))

    def mean(self, kind: str) -> float:
        """Mean commit_len: accepted drafts and the bonus token."""
        return 1.0 + float((1.0 - self.cumulative[kind][:-1]).sum())


def load_commits(path: Path = DEFAULT_COMMITS) -> CommitLengths:
    """Read ``{"kinds": {kind: [steps that accepted 0, 1, … drafts]}}``. ``CommitsError``."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommitsError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CommitsError(f"{path}: not valid JSON: {error}") from None
    kinds = values.get("kinds") if isinstance(values, dict) else None
    if not isinstance(kinds, dict) or not kinds:
        raise CommitsError(f"{path}: kinds must be an object of at least one list")
    return CommitLengths(
        {str(kind): _cumulative(kind, counts, path) for kind, counts in kinds.items()}
    )


def _cumulative(kind: str, counts: Any, path: Path) -> NDArray[np.float64]:
    numbers = counts if isinstance(counts, list) else []
    right = all(
        isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= _MOST_STEPS
        for n in numbers
    )
    if not numbers or not right or not math.fsum(numbers):
        raise CommitsError(
            f"{path}: kinds: {kind} must be a list of counts from 0 to {_MOST_STEPS:g}, not all 0"
        )
    shares = np.cumsum(np.asarray(numbers, dtype=np.float64))
    return np.asarray(shares / shares[-1])
