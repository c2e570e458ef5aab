"""Uniforms that belong to a position of a seeded answer, and log-probabilities of what
was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK = 4  # 64-bit words in one Philox4x64 counter step
_SEED_MASK = (1 << 128) - 1


def position_uniforms(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for the tokens at ``position``, ``position + 1``, …: float64 [count].

    Philox (Salmon et al., 2011) keyed by the seed with the position as counter: the uniform of a
    position is the same whether it is asked for alone or within a tree step, in whatever batch.
    """
    generator = np.random.Philox(key=seed & _SEED_MASK, counter=position)
    words = generator.random_raw(_BLOCK * count)[::_BLOCK]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a chosen token under the target, and the most probable
    alternatives there.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: NDArray[np.float32], tokens: Sequence[int], top: int
) -> list[TokenLogprob]:
    """Log-probabilities of ``tokens`` [k] under ``logits`` float32 [k, V], before temperature and
    filters.

    ``top`` alternatives each, most probable first, equal ones by lower token id.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    order = np.argsort(-wide, axis=1, kind="stable")[:, :top]
    return [
        TokenLogprob(
            token,
            float(wide[row, token]),
            tuple((int(other), float(wide[row, other])) for other in order[row]),
        )
        for row, token in enumerate(tokens)
    ]
