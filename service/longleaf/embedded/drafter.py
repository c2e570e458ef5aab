"""The DFlash drafter: a block of masks denoised at once, with the target's features as context.

The features of committed tokens become K/V rows of every draft layer (K/V injection); a draft then
runs only the block [anchor, mask, mask, ...] against them. Embedding and head are the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from longleaf.embedded.attention import Span, exponentiate, index_of, spans
from longleaf.embedded.config import DrafterConfig
from longleaf.embedded.feed_forward import DenseFeedForward, fold_norm, rms_unit
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.rope import (
    C64,
    frequencies,
    pair_halves,
    rotate,
    rotations,
    yarn_frequencies,
)
from longleaf.embedded.target import I64, Target
from longleaf.embedded.weights import F32, Weights


@dataclass(frozen=True, slots=True)
class DraftAnchor:
    """The last committed token, whose KV nobody has yet, and the context before it.

    Attributes:
        token: The anchor, at position ``prefix_len``.
        prefix_len: P >= 0.
        prefix_slots: int64[P], the slots of positions 0 .. P - 1, extended before.
    """

    token: int
    prefix_len: int
    prefix_slots: I64

    def __post_init__(self) -> None:
        if len(self.prefix_slots) != self.prefix_len:
            raise ValueError(
                f"a prefix of {self.prefix_len} tokens needs as many slots, got"
                f" {len(self.prefix_slots)}"
            )


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """A draft of each anchor.

    Attributes:
        logits: float32[B, block - 1, vocab], of the tokens after the anchor.
        span_tokens: int64[B], context rows that each windowed layer read (0 without such layers).
    """

    logits: F32
    span_tokens: I64


@dataclass(frozen=True, slots=True)
class _Context:
    """What one layer reads for one anchor: context rows, and what the block's rows hide.

    ``hidden`` is bool[block, context + block] or None when everything is visible.
    """

    where: list[Span]
    length: int
    hidden: npt.NDArray[np.bool_] | None


class _Layer:
    """One draft layer's weights, fused; rotary rows are reordered to pairs."""

    def __init__(self, weights: Weights, prefix: str, config: DrafterConfig) -> None:
        c, attn = config, prefix + "self_attn."
        self._heads, self._kv_heads, self._dim = c.num_heads, c.num_kv_heads, c.head_dim
        self._eps = c.rms_norm_eps
        pairs = pair_halves(c.head_dim)
        norm = weights.take(prefix + "input_layernorm.weight", c.hidden_size)
        q = _by_head(
            weights.take(attn + "q_proj.weight", c.num_heads * c.head_dim, c.hidden_size), c
        )
        kv_rows = c.num_kv_heads * c.head_dim
        k = _by_head(weights.take(attn + "k_proj.weight", kv_rows, c.hidden_size), c)
        self.key = k[:, pairs].reshape(-1, c.hidden_size)
        self.value = weights.take(attn + "v_proj.weight", kv_rows, c.hidden_size)
        self._input = fold_norm(
            norm, np.concatenate((q[:, pairs].reshape(-1, c.hidden_size), self.key, self.value))
        )
        q_norm = weights.take(attn + "q_norm.weight", c.head_dim)[pairs]
        self.key_norm = weights.take(attn + "k_norm.weight", c.head_dim)[pairs]
        scale = np.float32(c.head_dim**-0.5)
        self._qk_norm = np.concatenate(
            (
                np.broadcast_to(q_norm * scale, (c.num_heads, c.head_dim)),
                np.broadcast_to(self.key_norm, (c.num_kv_heads, c.head_dim)),
            )
        )
        out = weights.take(attn + "o_proj.weight", c.hidden_size, c.num_heads * c.head_dim)
        self._output = np.ascontiguousarray(out.T)
        norm = weights.take(prefix + "post_attention_layernorm.weight", c.hidden_size)
        self._ffn = DenseFeedForward.take(
            weights, prefix + "mlp.", c.hidden_size, c.intermediate_size, norm
        )

    def run(self, x: F32, at: C64, keys: F32, values: F32, contexts: Sequence[_Context]) -> None:
        """Update x float32[B * block, hidden] in place. keys, values: this layer's pool arrays."""
        rows, heads = len(x), self._heads + self._kv_heads
        fused = rms_unit(x, self._eps) @ self._input
        qk = fused[:, : heads * self._dim].reshape(rows * heads, self._dim)
        turned = rms_unit(qk, self._eps).reshape(rows, heads, self._dim)
        turned *= self._qk_norm
        rotate(turned, at)
        v = fused[:, heads * self._dim :].reshape(rows, self._kv_heads, self._dim)
        mixed = np.empty((rows, self._heads * self._dim), np.float32)
        block = rows // len(contexts)
        for i, context in enumerate(contexts):
            r = slice(i * block, (i + 1) * block)
            mixed[r] = self._attend(
                turned[r, : self._heads], turned[r, self._heads :], v[r], keys, values, context
            )
        x += mixed @ self._output
        x += self._ffn(rms_unit(x, self._eps))

    def _attend(self, q: F32, k: F32, v: F32, keys: F32, values: F32, context: _Context) -> F32:
        """q [block, heads, dim], own k, v [block, KV heads, dim] -> [block, heads * dim]."""
        block, group = len(q), self._heads // self._kv_heads
        # Query heads of one KV head become rows: [KV heads, group * block, dim].
        by_kv = q.reshape(block, self._kv_heads, group, self._dim).transpose(1, 2, 0, 3)
        rows = by_kv.reshape(self._kv_heads, group * block, self._dim)
        n = context.length
        scores = np.empty((self._kv_heads, group * block, n + block), np.float32)
        for span in context.where:
            found = keys[:, span.index].transpose(0, 2, 1)
            np.matmul(rows, found, out=scores[:, :, span.start : span.stop])
        np.matmul(rows, k.transpose(1, 2, 0), out=scores[:, :, n:])
        if context.hidden is not None:
            grouped = scores.reshape(self._kv_heads, group, block, n + block)
            np.copyto(grouped, -np.inf, where=context.hidden)
        total = exponentiate(scores)
        mixed = scores[:, :, n:] @ v.transpose(1, 0, 2)
        for span in context.where:
            mixed += scores[:, :, span.start : span.stop] @ values[:, span.index]
        mixed /= total
        shaped = mixed.reshape(self._kv_heads, group, block, self._dim)
        return shaped.transpose(2, 0, 1, 3).reshape(block, -1)


class Drafter:
    """A loaded drafter, bound to the target whose embedding and head it uses."""

    def __init__(self, config: DrafterConfig, weights: Weights, target: Target) -> None:
        config.check_target(target.config)
        self.config = config
        self._target = target
        c = config
        inputs = len(c.taps) * c.hidden_size
        fc = weights.take("fc.weight", c.hidden_size, inputs)
        self._fc = np.ascontiguousarray(fc.T)
        context_norm = weights.take("hidden_norm.weight", c.hidden_size)
        self._layers = [_Layer(weights, f"layers.{i}.", c) for i in range(c.num_layers)]
        self._norm = weights.take("norm.weight", c.hidden_size)
        weights.finish()
        stacked = [layer.key for layer in self._layers] + [layer.value for layer in self._layers]
        self._inject = fold_norm(context_norm, np.concatenate(stacked))
        self._key_norms = np.stack([layer.key_norm for layer in self._layers])
        if c.yarn is None:
            freqs, scale = frequencies(c.head_dim, c.rope_theta), 1.0
        else:
            freqs, scale = yarn_frequencies(c.head_dim, c.rope_theta, c.yarn)
        # A block may reach past the context's end: the target's limit bounds committed tokens only.
        positions = min(c.max_positions, target.config.max_positions) + c.block_size
        self._rotations = rotations(positions, freqs, scale)

    @classmethod
    def load(cls, directory: Path, target: Target) -> Self:
        """Read config.json and model.safetensors. Raises ConfigError or WeightsError."""
        return cls(DrafterConfig.load(directory), Weights.load(directory), target)

    @property
    def window_tokens(self) -> int | None:
        """Context rows that a windowed layer reads at most; None without such layers."""
        window = self.config.sliding_window
        return window - 1 if window else None

    def extend(self, features: F32, positions: I64, slots: I64, pool: KvPool) -> None:
        """Write the draft K/V of committed tokens from features float32[T, taps * hidden]."""
        c, rows = self.config, len(features)
        if rows == 0:
            return
        context = rms_unit(features @ self._fc, c.rms_norm_eps)
        both = context @ self._inject
        half = c.num_layers * c.num_kv_heads * c.head_dim
        keys = rms_unit(both[:, :half].reshape(-1, c.head_dim), c.rms_norm_eps)
        keys = keys.reshape(rows, c.num_layers, c.num_kv_heads, c.head_dim)
        keys *= self._key_norms[:, None, :]
        rotate(keys.reshape(rows, -1, c.head_dim), self._rotations[positions])
        values = both[:, half:].reshape(keys.shape)
        at = index_of(slots)
        pool.draft_keys[:, :, at] = keys.transpose(1, 2, 0, 3)
        pool.draft_values[:, :, at] = values.transpose(1, 2, 0, 3)

    def draft(self, anchors: Sequence[DraftAnchor], pool: KvPool) -> DraftOutput:
        """Draft block - 1 tokens after each anchor, independently. The pool is only read."""
        c, block = self.config, self.config.block_size
        tokens = np.full((len(anchors), block), c.mask_token_id, np.int64)
        tokens[:, 0] = [a.token for a in anchors]
        positions = np.array([[a.prefix_len] for a in anchors], np.int64) + np.arange(block)
        at = self._rotations[positions.reshape(-1)]
        x = self._target.embed(tokens.reshape(-1))
        windowed = [self._windowed(a) for a in anchors] if c.sliding_window else []
        full = [_Context(spans(a.prefix_slots), a.prefix_len, None) for a in anchors]
        with np.errstate(over="ignore"):
            for i, (layer, kind) in enumerate(zip(self._layers, c.layer_types, strict=True)):
                contexts = windowed if kind == "sliding_attention" else full
                layer.run(x, at, pool.draft_keys[i], pool.draft_values[i], contexts)
        hidden = rms_unit(x, c.rms_norm_eps)
        hidden *= self._norm
        # The anchor's row rides along: a multiple of 8 rows is quicker than 7.
        logits = self._target.logits(hidden).reshape(len(anchors), block, -1)[:, 1:]
        read = [w.length for w in windowed] if windowed else [0] * len(anchors)
        return DraftOutput(logits, np.array(read, np.int64))

    def _windowed(self, anchor: DraftAnchor) -> _Context:
        """Causal, keys at most ``sliding_window - 1`` positions back; older slots are not read."""
        block, window = self.config.block_size, self.config.sliding_window
        first = max(anchor.prefix_len - (window - 1), 0)
        length = anchor.prefix_len - first
        key = np.arange(first, anchor.prefix_len + block)
        query = anchor.prefix_len + np.arange(block)[:, None]
        hidden = (key > query) | (query - key >= window)
        return _Context(spans(anchor.prefix_slots[first:]), length, hidden)


def _by_head(rows: F32, config: DrafterConfig) -> F32:
    return rows.reshape(-1, config.head_dim, config.hidden_size)
