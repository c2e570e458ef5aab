"""After accept: accepted rows move to the front, the rest is dropped."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longleaf.engine.accept import Committed
from longleaf_kernels.accept import Accepted
from longleaf_kernels.compact import compact_kv


class DraftRows(NamedTuple):
    """The rows that the draft KV gets: the accepted path's, at the committed positions.

    hidden: [batch * length, width] of the target's tapped layers, positions: int64[batch *
    length], slots: int64[batch, length]; of each request the first commit_len rows count.
    """

    hidden: Tensor
    positions: Tensor
    slots: Tensor


def target_pools(kv_pool: Any) -> list[list[Tensor]]:
    """Return the KV tensors of every layer of SGLang's pool, those of one shape together.

    Raises TypeError for a pool that keeps its rows in another way.
    """
    rows = getattr(kv_pool, "kv_buffer", None)
    if rows is not None and isinstance(rows, Sequence):
        return [list(rows)]
    keys, values = getattr(kv_pool, "k_buffer", None), getattr(kv_pool, "v_buffer", None)
    if not isinstance(keys, Sequence) or not isinstance(values, Sequence):
        raise TypeError(f"DDTREE cannot move rows of a {type(kv_pool).__name__}")
    flat_keys = [pool.view(pool.shape[0], -1) for pool in keys]
    flat_values = [pool.view(pool.shape[0], -1) for pool in values]
    if flat_keys[0].shape == flat_values[0].shape:
        return [flat_keys + flat_values]
    return [flat_keys, flat_values]


class TargetCompactor:
    """Moves accepted rows of all layers to the front of a step's slots, one launch a shape."""

    def __init__(self) -> None:
        self._pools: list[list[Tensor]] = []
        self._of: tuple[Any, ...] = ()

    def __call__(self, kv_pool: Any, slots: Tensor, accepted: Accepted) -> None:
        """Compact after a step. slots: int64[batch, nodes], node i's row."""
        if slots.shape[1] == 1:
            return  # the root is where it belongs
        for pools in self._current(kv_pool):
            compact_kv(pools, slots, accepted.path, accepted.path_len)

    def _current(self, kv_pool: Any) -> list[list[Tensor]]:
        # SGLang may replace the tensors when it resizes the pool after capture.
        names = ("kv_buffer", "k_buffer", "v_buffer")
        first = tuple(tensors[0] for name in names if (tensors := getattr(kv_pool, name, None)))
        known = len(first) == len(self._of)
        if not known or any(a is not b for a, b in zip(first, self._of, strict=True)):
            self._pools, self._of = target_pools(kv_pool), first
        return self._pools


def draft_rows(hidden: Tensor, slots: Tensor, prefix_lens: Tensor, done: Committed) -> DraftRows:
    """Gather what the draft KV is appended from.

    hidden: [batch * nodes, width], slots: int64[batch, nodes]. Row d of a path is the committed
    token at position prefix + d, and after compaction its slot is the step's d-th.
    """
    length = done.rows.shape[1]
    depths = torch.arange(length, dtype=torch.int64, device=slots.device)
    return DraftRows(
        hidden=hidden.index_select(0, done.rows.view(-1)),
        positions=(prefix_lens.to(torch.int64).unsqueeze(1) + depths).view(-1),
        slots=slots[:, :length].contiguous(),
    )
