"""Rotary position embedding as one complex multiplication.

Both models keep rotary vectors with each rotated pair side by side, so that a vector of ``dim``
floats is ``dim / 2`` complex numbers and position p multiplies number i by ``exp(1j * p * f[i])``.
Checkpoints in the half-split layout have their projection rows reordered once, at load
(``pair_halves``): scores are the same, because queries and keys are reordered alike.
"""

import math

import numpy as np
import numpy.typing as npt

from longleaf.embedded.config import YarnConfig
from longleaf.embedded.weights import F32

F64 = npt.NDArray[np.float64]
C64 = npt.NDArray[np.complex64]


def frequencies(dim: int, theta: float) -> F64:
    """float64[dim / 2]: radians a position, from fast to slow."""
    return np.asarray(theta ** (-np.arange(0, dim, 2) / dim), np.float64)


def yarn_frequencies(dim: int, theta: float, yarn: YarnConfig) -> tuple[F64, float]:
    """YaRN's frequencies, float64[dim / 2], and its factor on cos and sin.

    Pairs that turn more than ``beta_fast`` times in the original context keep their frequency,
    those under ``beta_slow`` turns are slowed by ``factor``, with a linear ramp between
    (arXiv:2309.00071, section 3.2); the factor is its section 3.3.
    """
    plain = frequencies(dim, theta)

    def pair_turning(turns: float) -> float:
        wavelength = yarn.original_max_positions / (2 * math.pi * turns)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    ramp = (np.arange(dim // 2) - first) / (last - first if last != first else 1e-3)
    slowed = np.clip(ramp, 0.0, 1.0)
    scale = (0.1 * math.log(yarn.factor) + 1.0) * yarn.attention_factor
    return plain * (1 - slowed) + plain / yarn.factor * slowed, scale


def rotations(positions: int, freqs: F64, scale: float = 1.0) -> C64:
    """complex64[positions, dim / 2]: the rotation of every position, times ``scale``."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * freqs
    return np.asarray(scale * np.exp(1j * angles), np.complex64)


def rotate(x: F32, at: C64) -> None:
    """Rotate in place: x float32[T, heads, dim], contiguous along dim; at complex64[T, dim / 2]."""
    turned = x.view(np.complex64)
    np.multiply(turned, at[:, None, :], out=turned)


def pair_halves(dim: int) -> npt.NDArray[np.int64]:
    """Row order that turns the half-split layout into pairs: 0, dim/2, 1, dim/2 + 1, ..."""
    return np.arange(dim, dtype=np.int64).reshape(2, dim // 2).T.reshape(dim)
