"""Softmax attention over pool slots, in blocks of query rows.

One segment's queries see its prefix and, among its own rows, what ``hidden`` leaves visible. Keys
and values come from the pool through ``Span``s: a run of consecutive slots is read in place (a
slice), scattered slots are gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longleaf.embedded.weights import F32
from longleaf.embedded.workers import Workers

Mask = npt.NDArray[np.bool_]
Index = slice | npt.NDArray[np.int64]

_SHORT_RUN = 64
"""Runs of fewer slots are gathered together: below this, a copy costs less than another product."""

_BLOCK_SCORES = 1 << 18
"""Scores held at once (1 MiB): a block of queries is as large as this allows."""

_MIN_ROWS = 64
"""Query rows of a block of one head: with fewer, laying out the keys costs more than using them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Keys ``start`` .. ``stop`` (exclusive) of a segment and where the pool holds them."""

    index: Index
    start: int
    stop: int

    def until(self, stop: int) -> "Span":
        """The same span, cut at key ``stop``."""
        if stop >= self.stop:
            return self
        count = stop - self.start
        if isinstance(self.index, slice):
            return Span(slice(self.index.start, self.index.start + count), self.start, stop)
        return Span(self.index[:count], self.start, stop)


def index_of(slots: npt.NDArray[np.int64]) -> Index:
    """``slots`` int64[n], n >= 1, as a slice if they are consecutive, else as they are."""
    first, n = int(slots[0]), len(slots)
    if n == 1 or bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + n)
    return slots


def spans(slots: npt.NDArray[np.int64]) -> list[Span]:
    """Cover ``slots`` int64[n], in order, by slices of consecutive slots and gathered rests."""
    n = len(slots)
    if n == 0:
        return []
    cuts = np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1
    found: list[Span] = []
    scattered = 0  # keys from here on wait to be gathered
    start = 0
    for stop in [*cuts.tolist(), n]:
        if stop - start >= _SHORT_RUN or len(cuts) == 0:
            if scattered < start:
                found.append(Span(slots[scattered:start], scattered, start))
            first = int(slots[start])
            found.append(Span(slice(first, first + stop - start), start, stop))
            scattered = stop
        start = stop
    if scattered < n:
        found.append(Span(slots[scattered:n], scattered, n))
    return found


class KeysValues(Protocol):
    """Scores of queries against keys, and values mixed by probabilities, for some heads at once."""

    @property
    def groups(self) -> int:
        """Independent groups of heads: the most that the caller may split over."""

    def scores(self, group: slice, rows: slice, stop: int, out: F32) -> None:
        """Write the scores of query rows against keys 0 .. stop into out [groups, rows, stop]."""

    def mix(self, group: slice, probs: F32, stop: int, out: F32) -> None:
        """Write probs [groups, rows, stop] times the values into out [groups, rows, width]."""


def attend(
    kv: KeysValues, rows: int, keys: int, hidden: Mask | None, out: F32, workers: Workers
) -> None:
    """Softmax attention of ``rows`` queries, which are the last ``rows`` of ``keys`` keys.

    Args:
        kv: Queries, keys and values of the segment.
        rows: Query rows T.
        keys: Key rows P + T; the first P are visible to every query.
        hidden: bool[T, T], true where query row i must not see own row j; None is causal.
        out: float32[groups, T, width], written.
        workers: Run the blocks of queries, which do not depend on each other.
    """
    prefix = keys - rows
    group_step, row_step = _block(kv.groups, rows, keys)
    later = np.triu(np.ones((row_step, row_step), np.bool_), 1)

    def attend_block(group: slice, block: slice) -> None:
        if hidden is None:  # nothing past the block's last row, and a triangle before that
            first, stop = prefix + block.start, prefix + block.stop
            masked = later[: stop - first, : stop - first]
        else:
            first, stop = prefix, keys
            masked = hidden[block]
        size = (group.stop - group.start, block.stop - block.start, stop)
        scores = np.empty(size, np.float32)
        kv.scores(group, block, stop, scores)
        if rows > 1:
            np.copyto(scores[:, :, first:], -np.inf, where=masked)
        total = exponentiate(scores)
        mixed = out[group, block]
        kv.mix(group, scores, stop, mixed)
        mixed /= total

    workers.run(
        [
            partial(attend_block, group, block)
            for group in _slices(kv.groups, group_step)
            for block in _slices(rows, row_step)
        ]
    )


def _slices(count: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def exponentiate(scores: F32) -> F32:
    """Replace scores [..., n] by exp(scores - their maximum); the sums over n, [..., 1]."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: F32 = scores @ np.ones((scores.shape[-1], 1), np.float32)
    return sums


def _block(groups: int, rows: int, keys: int) -> tuple[int, int]:
    """Groups and rows of one block of scores."""
    if groups * rows * keys <= _BLOCK_SCORES:
        return groups, rows
    if rows * keys <= _BLOCK_SCORES:
        return _BLOCK_SCORES // (rows * keys), rows
    return 1, max(_BLOCK_SCORES // keys, min(_MIN_ROWS, rows))


class PerHead:
    """Each head has keys and values of its own, plus a rotary key shared by all heads (MLA).

    Shapes: q float32[H, T, nope], q_rope float32[H, T, rope]; keys [H, slots, nope] and values
    [H, slots, v] of one layer, rope [slots, rope].
    """

    def __init__(
        self, q: F32, q_rope: F32, keys: F32, values: F32, rope: F32, where: Sequence[Span]
    ) -> None:
        self.groups = q.shape[0]
        self._q, self._q_rope = q, q_rope
        self._keys, self._values, self._rope, self._where = keys, values, rope, where

    def scores(self, group: slice, rows: slice, stop: int, out: F32) -> None:
        """See KeysValues."""
        q, q_rope = self._q[group, rows], self._q_rope[group, rows]
        flat = q_rope.reshape(-1, q_rope.shape[-1])
        for span in _upto(self._where, stop):
            part = out[:, :, span.start : span.stop]
            np.matmul(q, self._keys[group, span.index].transpose(0, 2, 1), out=part)
            part += (flat @ self._rope[span.index].T).reshape(part.shape)

    def mix(self, group: slice, probs: F32, stop: int, out: F32) -> None:
        """See KeysValues."""
        for i, span in enumerate(_upto(self._where, stop)):
            values = self._values[group, span.index]
            if i == 0:
                np.matmul(probs[:, :, span.start : span.stop], values, out=out)
            else:
                out += probs[:, :, span.start : span.stop] @ values


class Absorbed:
    """Queries moved into latent space: all heads share the latent rows as keys and as values.

    Shapes: q float32[H, T, latent width]; latent [slots, latent width], whose first ``rank`` floats
    are the values.
    """

    def __init__(self, q: F32, latent: F32, rank: int, where: Sequence[Span]) -> None:
        self.groups = q.shape[0]
        self._q, self._latent, self._rank, self._where = q, latent, rank, where

    def scores(self, group: slice, rows: slice, stop: int, out: F32) -> None:
        """See KeysValues."""
        q = self._q[group, rows]
        flat = q.reshape(-1, q.shape[-1])
        for span in _upto(self._where, stop):
            part = out[:, :, span.start : span.stop]
            part[:] = (flat @ self._latent[span.index].T).reshape(part.shape)

    def mix(self, group: slice, probs: F32, stop: int, out: F32) -> None:
        """See KeysValues."""
        for i, span in enumerate(_upto(self._where, stop)):
            part = probs[:, :, span.start : span.stop]
            latent = self._latent[span.index, : self._rank]
            mixed = part.reshape(-1, part.shape[-1]) @ latent
            if i == 0:
                out[:] = mixed.reshape(out.shape)
            else:
                out += mixed.reshape(out.shape)


def _upto(where: Sequence[Span], stop: int) -> list[Span]:
    return [span.until(stop) for span in where if span.start < stop]
