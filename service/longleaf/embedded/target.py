"""The target model: a DeepSeek-V3-style decoder in numpy, float32 throughout.

One forward serves prefill chunks, decode rows and verify trees alike: a ``Segment`` says which rows
there are, where they go and what they see. Linear layers run over all segments together.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from longleaf.embedded.attention import Mask, index_of, spans
from longleaf.embedded.blas import use_one_blas_thread
from longleaf.embedded.config import TargetConfig
from longleaf.embedded.feed_forward import DenseFeedForward, rms_unit
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.mla import Batch, LatentAttention, SegmentRows
from longleaf.embedded.moe import MixtureOfExperts
from longleaf.embedded.rope import frequencies, rotations
from longleaf.embedded.weights import F32, Weights
from longleaf.embedded.workers import Workers

I64 = npt.NDArray[np.int64]

_ROW_MULTIPLE = 4
"""Matrix kernels take rows in fours: a remainder of 1..3 costs more than padding it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one request in a forward: a prefill chunk, one decode row, or a verify tree.

    Attributes:
        tokens: int64[T], T >= 1.
        positions: int64[T], each below ``max_positions``.
        slots: int64[T], where the rows' KV is written.
        prefix_slots: int64[P], the slots of positions 0 .. P - 1, all visible to every row.
        visible: bool[T, T], row i sees own row j iff visible[i, j]; the diagonal must be true. None
            is causal.
    """

    tokens: I64
    positions: I64
    slots: I64
    prefix_slots: I64
    visible: Mask | None = None

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if rows < 1:
            raise ValueError("a segment needs at least one row")
        if len(self.positions) != rows or len(self.slots) != rows:
            raise ValueError(
                f"a segment of {rows} tokens needs as many positions and slots, got"
                f" {len(self.positions)} and {len(self.slots)}"
            )
        if self.visible is not None and self.visible.shape != (rows, rows):
            raise ValueError(f"visible must be [{rows}, {rows}], got {list(self.visible.shape)}")


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a forward gives, rows in the order of the segments.

    Attributes:
        hidden: float32[rows, hidden], after the final norm.
        features: float32[rows, taps * hidden], outputs of the tapped layers side by side.
        kv_bytes_read: Bytes of KV rows that attention read (P + T rows a segment, every layer).
    """

    hidden: F32
    features: F32
    kv_bytes_read: int


class Target:
    """A loaded target. Immutable: a forward changes only the pool that it is given."""

    def __init__(
        self,
        config: TargetConfig,
        weights: Weights,
        taps: Sequence[int] = (),
        threads: int = 1,
    ) -> None:
        """Fuse ``weights`` for the forward.

        Args:
            config: Shapes and constants.
            weights: Every tensor that the config calls for.
            taps: Layers whose outputs become features.
            threads: Threads that share the attention of long contexts and chunks.
        """
        self.config = config
        self._workers = Workers(threads)
        self._taps = {layer: i for i, layer in enumerate(taps)}
        c = config
        self._embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self._layers: list[tuple[LatentAttention, DenseFeedForward | MixtureOfExperts]] = []
        for i in range(c.num_layers):
            prefix = f"model.layers.{i}."
            norm = weights.take(prefix + "input_layernorm.weight", c.hidden_size)
            attention = LatentAttention(weights, prefix + "self_attn.", c, norm, i)
            norm = weights.take(prefix + "post_attention_layernorm.weight", c.hidden_size)
            ffn: DenseFeedForward | MixtureOfExperts
            if c.is_moe(i):
                ffn = MixtureOfExperts(weights, prefix + "mlp.", c, norm)
            else:
                ffn = DenseFeedForward.take(
                    weights, prefix + "mlp.", c.hidden_size, c.intermediate_size, norm
                )
            self._layers.append((attention, ffn))
        self._norm = weights.take("model.norm.weight", c.hidden_size)
        head = self._embedding
        if not c.tie_word_embeddings:
            head = weights.take("lm_head.weight", c.vocab_size, c.hidden_size)
        self._head = np.ascontiguousarray(head.T)
        weights.finish()
        self._rotations = rotations(c.max_positions, frequencies(c.qk_rope_head_dim, c.rope_theta))
        self._row_bytes = c.num_layers * c.latent_width * self._embedding.itemsize

    @classmethod
    def load(cls, directory: Path, taps: Sequence[int] = (), threads: int | None = None) -> Self:
        """Read config.json and model.safetensors. Raises ConfigError or WeightsError.

        ``threads`` None is as many as this process may use, up to 4.

        From then on this process's BLAS runs on one thread (see ``use_one_blas_thread``).
        """
        use_one_blas_thread()
        threads = min(len(os.sched_getaffinity(0)), 4) if threads is None else threads
        return cls(TargetConfig.load(directory), Weights.load(directory), taps, threads)

    def embed(self, tokens: I64) -> F32:
        """int64[T] -> float32[T, hidden]."""
        return self._embedding[tokens]

    def logits(self, hidden: F32) -> F32:
        """float32[R, hidden] after a final norm -> float32[R, vocab]."""
        rows = len(hidden)
        return (pad_rows(hidden) @ self._head)[:rows]

    def forward(self, segments: Sequence[Segment], pool: KvPool) -> TargetOutput:
        """Run all layers over the segments' rows; writes their KV to their slots, nowhere else.

        Raises:
            IndexError: A token, position or slot is out of range.
        """
        batch = self._batch(segments)
        rows = batch.rows
        width = self.config.hidden_size
        x = pad_rows(self.embed(_joined([s.tokens for s in segments])))
        features = np.empty((rows, len(self._taps) * width), np.float32)
        eps = self.config.rms_norm_eps
        with np.errstate(over="ignore"):
            for i, (attention, ffn) in enumerate(self._layers):
                x += attention(rms_unit(x, eps), batch, pool)
                x += ffn(rms_unit(x, eps))
                if i in self._taps:
                    at = self._taps[i] * width
                    features[:, at : at + width] = x[:rows]
        hidden = rms_unit(x[:rows], eps)
        hidden *= self._norm
        keys = sum(s.keys for s in batch.segments)
        return TargetOutput(hidden, features, keys * self._row_bytes)

    def _batch(self, segments: Sequence[Segment]) -> Batch:
        placed: list[SegmentRows] = []
        start = 0
        for s in segments:
            rows = slice(start, start + len(s.tokens))
            start = rows.stop
            slots = np.concatenate((s.prefix_slots, s.slots))
            hidden = None if s.visible is None else ~s.visible
            placed.append(SegmentRows(rows, len(slots), spans(slots), hidden))
        positions = _joined([s.positions for s in segments])
        write = index_of(_joined([s.slots for s in segments]))
        return Batch(self._rotations[positions], write, placed, self._workers)


def pad_rows(x: F32) -> F32:
    """x float32[R, n] with zero rows appended up to a multiple of 4; a single row stays."""
    missing = -len(x) % _ROW_MULTIPLE
    if len(x) == 1 or missing == 0:
        return x
    return np.concatenate((x, np.zeros((missing, x.shape[1]), np.float32)))


def _joined(parts: list[I64]) -> I64:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
