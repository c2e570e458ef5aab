"""The target's sampling distribution, and a draw from it.

Order of the filters: temperature, top-k, top-p, min-p, each over what the one before left,
renormalised. That is SGLang's order in speculative verification (which has no min-p) and in its
sampler when min-p is set; without min-p its sampler counts top-p mass over the whole
vocabulary, and vLLM applies min-p before top-k.
"""

from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from longleaf.ddtree.ranking import rank_descending

WHOLE_VOCABULARY = -1
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy, as in SGLang."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target samples. Raises ValueError naming the field and its limit.

    temperature: >= 0; 0 (anything below 1e-6) is greedy.
    top_p: in (0, 1]; keep the fewest most probable tokens that hold this mass; 1 keeps all.
    top_k: -1 for the whole vocabulary, or at least 1; 1 is greedy.
    min_p: in [0, 1]; drop tokens less probable than min_p times the most probable one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = WHOLE_VOCABULARY
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != WHOLE_VOCABULARY and self.top_k < 1:
            raise ValueError(
                f"top_k must be -1 (the whole vocabulary) or at least 1, got {self.top_k}"
            )
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken (equal logits: lowest id)."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


def target_distribution(
    logits: npt.NDArray[np.floating], params: SamplingParams
) -> npt.NDArray[np.float64]:
    """Return the distribution that a request samples from, float64[V], sum 1.

    logits: [V], any float dtype; -inf marks a forbidden token. Ranks are by logit, equal logits
    by lower token id, so top-k keeps exactly k tokens. top-p keeps a token iff the mass ranked
    before it is below top_p. Greedy parameters give all mass to the argmax.
    Raises ValueError for NaN, +inf or logits of -inf alone.
    """
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"logits must be [V], V >= 1, got shape {list(logits.shape)}")
    peak = float(logits.max())
    if not -inf < peak < inf:  # NaN fails too
        raise ValueError(f"logits must have a finite maximum, got {peak}")
    probs = np.zeros(logits.shape[0], dtype=np.float64)
    if params.greedy:
        probs[int(logits.argmax())] = 1.0
        return probs
    weights = logits.astype(np.float64)
    weights -= peak
    weights /= params.temperature
    np.exp(weights, out=weights)
    kept = _top_k_top_p(logits, weights, params)
    probs[kept] = weights[kept]
    if params.min_p > 0.0:
        probs[probs < params.min_p] = 0.0  # the most probable weight is exp(0) = 1
    probs /= probs.sum()
    return probs


def _top_k_top_p(
    logits: npt.NDArray[np.floating], weights: npt.NDArray[np.float64], params: SamplingParams
) -> npt.NDArray[np.int64] | slice:
    """Return an index of the tokens that pass top-k and then top-p."""
    vocabulary = logits.shape[0]
    limit = vocabulary if params.top_k == WHOLE_VOCABULARY else min(params.top_k, vocabulary)
    survivors = slice(None) if limit == vocabulary else rank_descending(logits, limit)
    if params.top_p == 1.0:
        return survivors
    threshold = params.top_p * weights[survivors].sum()
    # The nucleus is small as a rule: widen the ranking until it holds the mass asked for.
    width = min(64, limit)
    while True:
        ranked = rank_descending(logits, width)
        mass = np.cumsum(weights[ranked])
        if mass[-1] >= threshold or width == limit:
            return ranked[: np.searchsorted(mass, threshold, side="left") + 1]
        width = min(8 * width, limit)


def draw(probs: npt.NDArray[np.float64], u: float) -> int:
    """Return the token that inverse-CDF sampling gives for the uniform `u` in [0, 1].

    probs: float64[V], non-negative; its sum need not be exactly 1. The answer is the lowest
    token whose cumulative mass, summed by ascending id, exceeds u times the total; where
    rounding leaves none (u at or next to 1), the highest one that adds mass. Never a token of
    probability zero.
    """
    if not 0.0 <= u <= 1.0:
        raise ValueError(f"u must be in [0, 1], got {u}")
    cumulative = np.cumsum(probs)
    total = float(cumulative[-1])
    if not 0.0 < total < inf:
        raise ValueError(f"probs must have a positive finite sum, got {total}")
    token = int(np.searchsorted(cumulative, u * total, side="right"))
    if token == cumulative.size:
        token = int(np.searchsorted(cumulative, total, side="left"))
    return token
