"""After accept: accepted rows of the target's KV move to the front of the step's slots."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from longleaf_kernels.accept import Accepted
from longleaf_kernels.eager import CompactPlan


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
        self._plans: list[CompactPlan] = []
        self._of: tuple[Any, ...] = ()

    def __call__(self, kv_pool: Any, slots: Tensor, accepted: Accepted) -> None:
        """Compact after a step. slots: int64[batch, nodes], node i's row."""
        if slots.shape[1] == 1:
            return  # the root is where it belongs
        for plan in self._current(kv_pool):
            plan(slots, accepted.path, accepted.path_len)

    def _current(self, kv_pool: Any) -> list[CompactPlan]:
        # SGLang may replace the tensors when it resizes the pool after capture.
        names = ("kv_buffer", "k_buffer", "v_buffer")
        first = tuple(tensors[0] for name in names if (tensors := getattr(kv_pool, name, None)))
        known = len(first) == len(self._of)
        if not known or any(a is not b for a, b in zip(first, self._of, strict=True)):
            self._plans = [CompactPlan(pools) for pools in target_pools(kv_pool)]
            self._of = first
        return self._plans
