"""Compaction on the GPU: operator longleaf::compact_kv, all layers in one launch.

Row i of the accepted path moves to the slot of node i, as longleaf.ddtree.compaction_plan says,
in every pool at once; sources are read before destinations are written, and a path that is the
spine 0, 1, 2, … moves nothing.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf_kernels._checks import (
    check_aligned,
    check_cuda,
    check_no_grad,
    check_range,
    check_tensor,
)
from longleaf_kernels._launch import launching
from longleaf_kernels._library import Library

MAX_POOLS = 256
ROW_ALIGNMENT = 16
SLOT_TYPES = (torch.int64, torch.int32)


def compact_kv(pools: Sequence[Tensor], slots: Tensor, path: Tensor, path_len: Tensor) -> None:
    """Move the accepted rows of every pool to the front of their step's slots, in place.

    pools: one tensor a layer, any dtype, all of one shape and strides: [slots, width] or
    [pages, page_size, width], a slot being a row of the flattened pool; at most 256.
    slots: int64 or int32 [batch, n], the slot of each node; those of a batch are distinct.
    path: int32[batch, max_path], path_len: int32[batch], of `Accepted`.
    """
    torch.ops.longleaf.compact_kv(list(pools), slots, path, path_len)


class _CompactArgs(ctypes.Structure):
    _fields_ = (
        ("pools", ctypes.POINTER(ctypes.c_void_p)),
        ("pool_count", ctypes.c_int32),
        ("row_bytes", ctypes.c_int32),
        ("row_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("slots_are_int64", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("nodes", ctypes.c_int32),
        ("max_path", ctypes.c_int32),
        ("path", ctypes.c_void_p),
        ("path_len", ctypes.c_void_p),
    )


class CompactPlan:
    """Pools that are checked once, for the compactions of many steps.

    Checking 61 pools and passing them through an operator costs the CPU a millisecond a call.
    The pools must stay where they are for as long as the plan is used: it keeps them alive.
    """

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: as `compact_kv` takes them."""
        self._row_bytes, self._row_stride = _check_pools(pools)
        for i, pool in enumerate(pools):
            check_aligned(f"pools[{i}]", pool, ROW_ALIGNMENT)
        self._pools = tuple(pools)
        self._device = pools[0].device
        addresses = [pool.data_ptr() for pool in pools]
        if len(set(addresses)) < len(addresses):
            raise ValueError("pools must be distinct, got one twice")
        self._pointers = (ctypes.c_void_p * len(pools))(*addresses)

    def __call__(self, slots: Tensor, path: Tensor, path_len: Tensor) -> None:
        """Move the accepted rows, as `compact_kv` does, on the current stream."""
        with launching(check_cuda("pools", self._pools[0])) as (loaded, stream):
            self.launch(loaded, stream, slots, path, path_len)

    def launch(
        self, loaded: Library, stream: int, slots: Tensor, path: Tensor, path_len: Tensor
    ) -> None:
        """Check the step's tensors and launch on a given library."""
        _check_paths(slots, path, path_len, self._device)
        batch, nodes = slots.shape
        args = _CompactArgs(
            pools=self._pointers,
            pool_count=len(self._pools),
            row_bytes=self._row_bytes,
            row_stride=self._row_stride,
            slots=slots.data_ptr(),
            slots_are_int64=slots.dtype == torch.int64,
            batch=batch,
            nodes=nodes,
            max_path=path.shape[1],
            path=path.data_ptr(),
            path_len=path_len.data_ptr(),
        )
        function = loaded.function(
            "longleaf_compact_kv", ctypes.POINTER(_CompactArgs), ctypes.c_void_p
        )
        loaded.check(function(args, stream), "compact_kv")


def launch_compact_kv(
    loaded: Library,
    stream: int,
    pools: Sequence[Tensor],
    slots: Tensor,
    path: Tensor,
    path_len: Tensor,
) -> None:
    """Check and launch on a given library."""
    CompactPlan(pools).launch(loaded, stream, slots, path, path_len)


def _check_paths(slots: Tensor, path: Tensor, path_len: Tensor, device: torch.device) -> None:
    check_tensor("slots", slots, SLOT_TYPES, ["batch", "n"], device)
    batch, nodes = slots.shape
    check_tensor("path", path, torch.int32, [batch, "max_path"], device)
    check_range("max_path", path.shape[1], 1, nodes)
    check_tensor("path_len", path_len, torch.int32, [batch], device)


def _check_pools(pools: Sequence[Tensor]) -> tuple[int, int]:
    """Check all but addresses; return the bytes of a row, and from slot to slot."""
    check_range("the number of pools", len(pools), 1, MAX_POOLS)
    check_no_grad(**{f"pools[{i}]": pool for i, pool in enumerate(pools)})
    first = pools[0]
    device = first.device
    if first.dim() not in (2, 3):
        raise ValueError(
            f"pools must be [slots, width] or [pages, page_size, width], got {list(first.shape)}"
        )
    for i, pool in enumerate(pools):
        name = f"pools[{i}]"
        check_tensor(name, pool, first.dtype, list(first.shape), device, contiguous=False)
        if pool.stride() != first.stride():
            raise ValueError(
                f"{name} must have the strides of pools[0], {list(first.stride())}, "
                f"got {list(pool.stride())}"
            )
    if first.dim() == 3 and first.stride(0) != first.shape[1] * first.stride(1):
        raise ValueError(f"pages must follow each other, got strides {list(first.stride())}")
    row_bytes = first.shape[-1] * first.element_size()
    row_stride = first.stride(-2) * first.element_size()
    for what, size in (("rows of", row_bytes), ("rows that lie apart by", row_stride)):
        if size == 0 or size % ROW_ALIGNMENT:
            raise ValueError(
                f"pools must have {what} a multiple of {ROW_ALIGNMENT} bytes, got {size}"
            )
    return row_bytes, row_stride


@torch.library.custom_op("longleaf::compact_kv", mutates_args=("pools",))
def _compact_kv(pools: list[Tensor], slots: Tensor, path: Tensor, path_len: Tensor) -> None:
    with launching(check_cuda("slots", slots)) as (loaded, stream):
        launch_compact_kv(loaded, stream, pools, slots, path, path_len)


@_compact_kv.register_fake
def _(pools: list[Tensor], slots: Tensor, path: Tensor, path_len: Tensor) -> None:
    _check_pools(pools)
    _check_paths(slots, path, path_len, pools[0].device)
