"""The gated feed-forward block, and the norm that stands before it."""

import numpy as np

from longleaf.embedded.weights import F32, Weights


def rms_unit(x: F32, eps: float) -> F32:
    """x float32[T, n] over its root mean square along n: a norm whose weight is folded away."""
    out: F32 = x / np.sqrt(np.vecdot(x, x)[:, None] / x.shape[1] + eps)
    return out


def silu_gate(gate: F32, up: F32) -> F32:
    """silu(gate) * up, elementwise. exp may overflow to inf, which gives the right 0."""
    out: F32 = np.negative(gate)
    np.exp(out, out=out)
    out += 1.0
    np.divide(gate, out, out=out)
    out *= up
    return out


def fold_norm(norm: F32, matrix: F32) -> F32:
    """The matrix [out, in] after a norm's weight [in], transposed to [in, out]: x @ it."""
    return np.ascontiguousarray((matrix * norm).T)


class DenseFeedForward:
    """down(silu(gate(x)) * up(x)), bias-free."""

    def __init__(self, gate: F32, up: F32, down: F32, norm: F32) -> None:
        self._width = gate.shape[0]
        self._gate_up = fold_norm(norm, np.concatenate((gate, up)))
        self._down = np.ascontiguousarray(down.T)

    @classmethod
    def take(
        cls, weights: Weights, prefix: str, hidden: int, width: int, norm: F32
    ) -> "DenseFeedForward":
        """Take gate_proj, up_proj, down_proj under ``prefix``; ``norm`` [hidden] is folded in."""
        return cls(*take_projections(weights, prefix, hidden, width), norm)

    def __call__(self, x: F32) -> F32:
        """x float32[T, hidden], normalized but for the norm's weight -> float32[T, hidden]."""
        both = x @ self._gate_up
        return silu_gate(both[:, : self._width], both[:, self._width :]) @ self._down


def take_projections(
    weights: Weights, prefix: str, hidden: int, width: int
) -> tuple[F32, F32, F32]:
    """gate_proj and up_proj [width, hidden], down_proj [hidden, width]."""
    return (
        weights.take(prefix + "gate_proj.weight", width, hidden),
        weights.take(prefix + "up_proj.weight", width, hidden),
        weights.take(prefix + "down_proj.weight", hidden, width),
    )
