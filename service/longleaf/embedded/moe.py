"""DeepSeek-V3's mixture of experts: sigmoid scores, bias-corrected choice, shared experts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longleaf.embedded.config import TargetConfig
from longleaf.embedded.feed_forward import fold_norm, silu_gate, take_projections
from longleaf.embedded.weights import F32, Weights

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Route:
    """The experts of each row, int64[T, k], and their weights, float32[T, k]."""

    experts: I64
    weights: F32


class MixtureOfExperts:
    """Routed and shared experts alike: every row chooses the shared ones too, with weight 1.

    A shared block of n experts' width is n shared experts: the sum over its columns is the same.
    """

    def __init__(self, weights: Weights, prefix: str, config: TargetConfig, norm: F32) -> None:
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self._width, self._top_k = width, config.experts_per_token
        self._routed, self._shared = config.num_experts, config.num_shared_experts
        self._normalize, self._scale = config.norm_topk_prob, config.routed_scaling_factor
        router = weights.take(prefix + "gate.weight", self._routed, hidden)
        self._router = fold_norm(norm, router)
        self._bias = weights.take(prefix + "gate.e_score_correction_bias", self._routed)
        parts = [
            take_projections(weights, f"{prefix}experts.{e}.", hidden, width)
            for e in range(self._routed)
        ]
        if self._shared:
            gate, up, down = take_projections(
                weights, prefix + "shared_experts.", hidden, width * self._shared
            )
            for s in range(self._shared):
                cut = slice(s * width, (s + 1) * width)
                parts.append((gate[cut], up[cut], down[:, cut]))
        self._gate_up = [fold_norm(norm, np.concatenate((gate, up))) for gate, up, _ in parts]
        self._down = [np.ascontiguousarray(down.T) for _, _, down in parts]

    def __call__(self, x: F32) -> F32:
        """x float32[T, hidden], normalized but for the norm's weight -> float32[T, hidden].

        Pairs (row, expert) are grouped by expert, so that each expert that is chosen at all runs
        once, over its rows, and the activation runs once over all pairs.
        """
        route = self.route(x @ self._router)
        place, runs = self._group(route.experts)
        gathered = np.zeros((runs[-1][1].stop, x.shape[1]), np.float32)
        gathered[place] = x[:, None]
        both = np.empty((len(gathered), 2 * self._width), np.float32)
        for expert, run in runs:
            np.matmul(gathered[run], self._gate_up[expert], out=both[run])
        active = silu_gate(both[:, : self._width], both[:, self._width :])
        for expert, run in runs:
            np.matmul(active[run], self._down[expert], out=gathered[run])
        chosen = gathered[place]
        chosen *= route.weights[:, :, None]
        total: F32 = chosen.sum(axis=1)
        return total

    def route(self, logits: F32) -> Route:
        """Choose experts from router logits float32[T, E]; the shared ones follow."""
        rows = len(logits)
        scores = 1 / (1 + np.exp(-logits))
        best = np.argsort(-(scores + self._bias), axis=1, kind="stable")[:, : self._top_k]
        chosen = scores[np.arange(rows)[:, None], best]
        if self._normalize:
            chosen /= chosen.sum(axis=1, keepdims=True) + np.float32(1e-20)
        experts = np.empty((rows, self._top_k + self._shared), np.int64)
        experts[:, : self._top_k] = best
        experts[:, self._top_k :] = np.arange(self._routed, self._routed + self._shared)
        weights = np.ones(experts.shape, np.float32)
        weights[:, : self._top_k] = chosen * np.float32(self._scale)
        return Route(experts, weights)

    def _group(self, experts: I64) -> tuple[I64, list[tuple[int, slice]]]:
        """Lay pairs out by expert: each pair's place, int64[T, k], and each chosen expert's run.

        Runs of two or more pairs are padded to a multiple of four, which matrix kernels favour.
        """
        flat = experts.reshape(-1)
        counts = np.bincount(flat)
        padded = np.where(counts > 1, -(-counts // 4) * 4, counts)
        shift = np.cumsum(padded - counts) - (padded - counts)
        order = np.argsort(flat, kind="stable")
        place = np.empty_like(flat)
        place[order] = np.arange(len(flat)) + shift[flat[order]]
        stops = np.cumsum(padded).tolist()
        sizes = padded.tolist()
        runs = [
            (expert, slice(stop - size, stop))
            for expert, (stop, size) in enumerate(zip(stops, sizes, strict=True))
            if size
        ]
        return place.reshape(experts.shape), runs
