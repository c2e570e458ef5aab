"""Multi-head latent attention of one target layer, over a KV pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longleaf.embedded.attention import (
    Absorbed,
    Index,
    KeysValues,
    Mask,
    PerHead,
    Span,
    attend,
)
from longleaf.embedded.config import TargetConfig
from longleaf.embedded.feed_forward import fold_norm
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.rope import C64, pair_halves, rotate
from longleaf.embedded.weights import F32, Weights
from longleaf.embedded.workers import Workers

_KV_A_EPS = 1e-6
"""DeepSeek-V3 leaves this norm at its default, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """A segment within a batch: its rows, its keys (prefix, then own) and what its rows hide."""

    rows: slice
    keys: int
    where: list[Span]
    hidden: Mask | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What every layer needs to know about a forward: rotations and slots of all rows."""

    rotations: C64
    write: Index
    segments: Sequence[SegmentRows]
    workers: Workers

    @property
    def rows(self) -> int:
        """Rows of all segments together."""
        return len(self.rotations)


class LatentAttention:
    """MLA with the projections fused into one matrix.

    Columns of the input matrix [hidden, ...]: each head's query (without its rotary part); each
    head's rotary query; the shared rotary key; the latent; then each head's key and value straight
    from the hidden state (kv_b times kv_a, which leaves only the latent norm's divisor, one number
    a row, to apply). The softmax scale and the norm weight before the layer are folded in.
    """

    def __init__(
        self, weights: Weights, prefix: str, config: TargetConfig, norm: F32, layer: int
    ) -> None:
        self._layer, self._config = layer, config
        h, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        rank, width, v = config.kv_lora_rank, config.hidden_size, config.v_head_dim
        self._heads, self._nope, self._rope, self._rank, self._v = h, nope, rope, rank, v
        self._rotary_at, self._latent_at = h * nope, h * nope + (h + 1) * rope
        self._expanded_at = self._latent_at + rank
        q = weights.take(prefix + "q_proj.weight", h * (nope + rope), width)
        kv_a = weights.take(prefix + "kv_a_proj_with_mqa.weight", rank + rope, width)
        self._latent_norm = weights.take(prefix + "kv_a_layernorm.weight", rank)
        kv_b = weights.take(prefix + "kv_b_proj.weight", h * (nope + v), rank)
        out = weights.take(prefix + "o_proj.weight", width, h * v)

        q = (q * np.float32(config.qk_head_dim**-0.5)).reshape(h, nope + rope, width)
        rotary = np.concatenate((q[:, nope:], kv_a[None, rank:]))
        if not config.rope_interleave:
            rotary = rotary[:, pair_halves(rope)]
        per_head = kv_b.reshape(h, nope + v, rank)
        key_of, value_of = per_head[:, :nope], per_head[:, nope:]
        by_kind = np.concatenate((key_of.reshape(-1, rank), value_of.reshape(-1, rank)))
        direct = (by_kind.astype(np.float64) * self._latent_norm) @ kv_a[:rank]
        self._input = fold_norm(
            norm,
            np.concatenate(
                (
                    q[:, :nope].reshape(-1, width),
                    rotary.reshape(-1, width),
                    kv_a[:rank],
                    direct.astype(np.float32),
                )
            ),
        )
        self._output = np.ascontiguousarray(out.T)
        self._up = np.ascontiguousarray(by_kind.T)  # [rank, heads * nope + heads * v]
        self._absorb_key = np.ascontiguousarray(key_of)  # [heads, nope, rank]
        self._absorb_value = np.ascontiguousarray(value_of.transpose(0, 2, 1))  # [heads, rank, v]

    def __call__(self, x: F32, batch: Batch, pool: KvPool) -> F32:
        """x float32[R, hidden], normalized but for the weight -> float32[R, hidden].

        Rows past ``batch.rows`` are padding: they neither read nor write the pool.
        """
        columns = None if pool.expanded is not None else self._expanded_at
        fused = x @ self._input[:, :columns]
        rows = batch.rows
        rotary = fused[:rows, self._rotary_at : self._latent_at]
        rotary = rotary.reshape(rows, self._heads + 1, self._rope)
        rotate(rotary, batch.rotations)
        self._write(fused[:rows], rotary[:, -1], batch.write, pool)
        q = fused[:rows, : self._rotary_at].reshape(rows, self._heads, self._nope)
        mixed = np.zeros((len(x), self._heads, self._v), np.float32)
        for segment in batch.segments:
            r = segment.rows
            self._attend(
                q[r].transpose(1, 0, 2),
                rotary[r, :-1].transpose(1, 0, 2),
                segment,
                pool,
                mixed[r].transpose(1, 0, 2),
                batch.workers,
            )
        return mixed.reshape(len(x), -1) @ self._output

    def _write(self, fused: F32, rope_key: F32, at: Index, pool: KvPool) -> None:
        latent = fused[:, self._latent_at : self._expanded_at]
        inverse = 1 / np.sqrt(np.vecdot(latent, latent)[:, None] / self._rank + _KV_A_EPS)
        row = pool.latent[self._layer]
        row[at, : self._rank] = latent * inverse * self._latent_norm
        row[at, self._rank :] = rope_key
        if pool.expanded is None:
            return
        direct = fused[:, self._expanded_at :] * inverse
        split = self._heads * self._nope
        keys = direct[:, :split].reshape(-1, self._heads, self._nope)
        values = direct[:, split:].reshape(-1, self._heads, self._v)
        pool.expanded.keys[self._layer][:, at] = keys.transpose(1, 0, 2)
        pool.expanded.values[self._layer][:, at] = values.transpose(1, 0, 2)
        pool.expanded.rope_keys[self._layer][at] = rope_key

    def _attend(
        self, q: F32, q_rope: F32, segment: SegmentRows, pool: KvPool, out: F32, workers: Workers
    ) -> None:
        """q [H, T, nope], q_rope [H, T, rope] -> out [H, T, v], by the form with fewer products."""
        rows, keys = q.shape[1], segment.keys
        latent = pool.latent[self._layer]
        kv: KeysValues
        if pool.expanded is not None:
            held, i = pool.expanded, self._layer
            k, v, rope = held.keys[i], held.values[i], held.rope_keys[i]
            kv = PerHead(q, q_rope, k, v, rope, segment.where)
        elif absorbing_is_cheaper(self._config, rows, keys):
            absorbed = np.concatenate((q @ self._absorb_key, q_rope), axis=-1)
            kv = Absorbed(absorbed, latent, self._rank, segment.where)
            compressed = np.empty((self._heads, rows, self._rank), np.float32)
            attend(kv, rows, keys, segment.hidden, compressed, workers)
            np.matmul(compressed, self._absorb_value, out=out)
            return
        else:
            kv = self._project(q, q_rope, latent, segment)
        attend(kv, rows, keys, segment.hidden, out, workers)

    def _project(self, q: F32, q_rope: F32, latent: F32, segment: SegmentRows) -> PerHead:
        cached = np.concatenate([latent[span.index] for span in segment.where])
        up = cached[:, : self._rank] @ self._up
        split = self._heads * self._nope
        keys = up[:, :split].reshape(-1, self._heads, self._nope).transpose(1, 0, 2)
        values = up[:, split:].reshape(-1, self._heads, self._v).transpose(1, 0, 2)
        where = [Span(slice(0, len(cached)), 0, len(cached))]
        return PerHead(q, q_rope, keys, values, cached[:, self._rank :], where)


def absorbing_is_cheaper(config: TargetConfig, rows: int, keys: int) -> bool:
    """Whether moving ``rows`` queries into latent space takes fewer multiplications than projecting
    ``keys`` latent rows to each head's keys and values."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    per_head = config.qk_nope_head_dim + config.v_head_dim
    absorbed = rows * (rank * per_head + keys * (2 * rank + rope))
    projected = keys * (rank * per_head + rows * (per_head + rope))
    return absorbed <= projected
