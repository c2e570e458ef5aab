"""The line that step time follows: a constant, and so much for each token of context."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

CARDS = {
    "rtx-pro-6000-ws": 1.792e12,
    "rtx-pro-6000-se": 1.597e12,
    "h100": 3.35e12,
    "h200": 4.8e12,
    "b200": 8.0e12,
}
"""Peak of device memory in bytes a second, as the makers state it."""


@dataclass(frozen=True, slots=True)
class Line:
    """``constant`` in seconds, ``slope`` in seconds a token."""

    constant: float
    slope: float

    def at(self, tokens: float) -> float:
        """Seconds of a step at a context."""
        return self.constant + self.slope * tokens

    def bandwidth(self, token_bytes: float) -> float | None:
        """Bytes a second that the slope amounts to; None if steps do not grow with the context."""
        return token_bytes / self.slope if self.slope > 0 else None


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """Least squares of relative errors over (tokens, seconds); None below two contexts."""
    if len({tokens for tokens, _ in points}) < 2:
        return None
    weights = [seconds**-2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    together = sum(
        w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)
    )
    slope = together / spread
    return Line(mean_y - slope * mean_x, slope)


@dataclass(slots=True)
class StepCell:
    """Seconds a step at one context, sample by sample; ``why`` where some or all are missing."""

    context: int
    samples: list[float]
    tokens_per_step: list[float]
    tokens: float = 0.0
    why: str = ""

    @property
    def mean(self) -> float | None:
        """Mean seconds a step."""
        return fmean(self.samples) if self.samples else None
