"""DeepSeek-V3's mixture of experts: sigmoid scores, bias-corrected choice, shared experts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longleaf.embedded.config import TargetConfig
from longleaf.embedded.feed_forward import fold_norm, silu_gate, take_projections
from longleaf.embedded.weights import F32, Weights

_ALL_EXPERTS_ROWS = 32
"""Up to this many rows every expert is computed for every row: two large products cost less than
many tiny ones. Above, rows are gathered by expert."""


@dataclass(frozen=True, slots=True)
class Route:
    """The experts of each row, int64[T, k], and their weights, float32[T, k]."""

    experts: npt.NDArray[np.int64]
    weights: F32


class MixtureOfExperts:
    """Router, routed experts and the shared expert as one fused input and one output matrix.

    Columns of the input matrix [hidden, E + slots * 2 * width]: router scores of the E experts,
    then gate and up of each slot; the shared experts fill the slots after the routed ones.
    """

    def __init__(self, weights: Weights, prefix: str, config: TargetConfig, norm: F32) -> None:
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self._experts, self._width = config.num_experts, width
        self._slots = config.num_experts + config.num_shared_experts
        self._top_k, self._normalize = config.experts_per_token, config.norm_topk_prob
        self._scale = np.float32(config.routed_scaling_factor)
        router = weights.take(prefix + "gate.weight", self._experts, hidden)
        self._bias = weights.take(prefix + "gate.e_score_correction_bias", self._experts)
        parts = [
            take_projections(weights, f"{prefix}experts.{e}.", hidden, width)
            for e in range(self._experts)
        ]
        if config.num_shared_experts:
            shared = width * config.num_shared_experts
            gate, up, down = take_projections(weights, prefix + "shared_experts.", hidden, shared)
            for s in range(config.num_shared_experts):
                cut = slice(s * width, (s + 1) * width)
                parts.append((gate[cut], up[cut], down[:, cut]))
        inputs = [router, *(rows for gate, up, _ in parts for rows in (gate, up))]
        self._input = fold_norm(norm, np.concatenate(inputs))
        self._output = np.ascontiguousarray(np.concatenate([down.T for _, _, down in parts]))

    def __call__(self, x: F32) -> F32:
        """x float32[T, hidden], normalized but for the norm's weight -> float32[T, hidden]."""
        if len(x) <= _ALL_EXPERTS_ROWS:
            return self._every_expert(x)
        return self._by_expert(x)

    def route(self, logits: F32) -> Route:
        """Choose experts from router logits float32[T, E] (highest biased score first)."""
        scores = 1 / (1 + np.exp(-logits))
        order = np.argsort(-(scores + self._bias), axis=1, kind="stable")[:, : self._top_k]
        chosen = np.take_along_axis(scores, order, axis=1)
        if self._normalize:
            chosen /= chosen.sum(axis=1, keepdims=True) + np.float32(1e-20)
        chosen *= self._scale
        return Route(order, chosen)

    def _every_expert(self, x: F32) -> F32:
        fused = x @ self._input
        route = self.route(fused[:, : self._experts])
        inner = fused[:, self._experts :].reshape(len(x), self._slots, 2, self._width)
        share = np.zeros((len(x), self._slots, 1), np.float32)
        share[:, self._experts :] = 1.0
        share[np.arange(len(x))[:, None], route.experts, 0] = route.weights
        active = silu_gate(inner[:, :, 0], inner[:, :, 1])
        active *= share
        return active.reshape(len(x), -1) @ self._output

    def _by_expert(self, x: F32) -> F32:
        route = self.route(x @ self._input[:, : self._experts])
        out = np.zeros_like(x)
        for slot in range(self._slots):
            if slot >= self._experts:
                out += self._expert(slot, x)
                continue
            rows, column = np.nonzero(route.experts == slot)
            if len(rows):
                out[rows] += self._expert(slot, x[rows]) * route.weights[rows, column, None]
        return out

    def _expert(self, slot: int, x: F32) -> F32:
        first = self._experts + slot * 2 * self._width
        both = x @ self._input[:, first : first + 2 * self._width]
        active = silu_gate(both[:, : self._width], both[:, self._width :])
        return active @ self._output[slot * self._width : (slot + 1) * self._width]
