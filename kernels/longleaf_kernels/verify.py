"""Verify attention: every node of a step's trees over an MLA cache, in one launch.

The same operator serves plain decode (one node a request) and a causal extend of new tokens over a
cached prefix (`visible=None`).
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from longleaf_kernels._checks import (
    check_aligned,
    check_apart,
    check_cuda,
    check_integer,
    check_no_grad,
    check_range,
    check_scale,
    check_tensor,
)
from longleaf_kernels._launch import launching
from longleaf_kernels._library import Library

LATENT_DIM = 512
ROW_DIM = 576
"""One cached token: 512 latent and 64 rotary dimensions; the value is the first 512."""
PAGE_SIZES = (1, 64)
MAX_BATCH = 1024
MAX_NODES = 512
MAX_HEADS = 128
MAX_ROW_GROUPS = 5
MAX_INT32 = 2**31 - 1
CHECK_VARIABLE = "LONGLEAF_CHECK_LENGTHS"
LOG2_E = 1.4426950408889634
_POOL_TYPES = (torch.bfloat16, torch.float8_e4m3fn)


class _Arguments(ctypes.Structure):
    """longleaf_verify_mla_args of csrc/verify_mla.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_pool", "kv_indptr", "kv_indices")),
        *((name, ctypes.c_void_p) for name in ("page_indptr", "tree_kv", "visible", "q_indptr")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "workspace")),
        *((name, ctypes.c_int64) for name in ("tokens", "slots", "indices")),
        *((name, ctypes.c_int32) for name in ("batch", "nodes", "heads", "page_size")),
        *((name, ctypes.c_int32) for name in ("wide_indices", "e4m3")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "kv_scale")),
        *((name, ctypes.c_int32) for name in ("row_groups", "gang", "min_tiles")),
    )


@dataclass(frozen=True)
class WorkSplit:
    """How a launch divides its work; 0 leaves the choice to the library. Changes only the speed.

    row_groups: 8-row groups of a row tile (1 to 5); gang: blocks that walk the same tokens;
    min_tiles: least number of 16-token tiles of a split.
    """

    row_groups: int = 0
    gang: int = 0
    min_tiles: int = 0

    def __post_init__(self) -> None:
        """Raise for a split that no launch takes."""
        _check_split(self.row_groups, self.gang, self.min_tiles)


def _check_split(row_groups: int, gang: int, min_tiles: int) -> None:
    for name, value, high in (
        ("row_groups", row_groups, MAX_ROW_GROUPS),
        ("gang", gang, MAX_INT32),
        ("min_tiles", min_tiles, MAX_INT32),
    ):
        check_integer(name, value)
        check_range(name, value, 0, high)


CHOSEN_BY_LIBRARY = WorkSplit()


@cache
def _workspace_bytes(loaded: Library, device_index: int) -> int:
    """Return the bytes for the current device, which device_index names."""
    function = loaded.function("longleaf_verify_mla_workspace", ctypes.POINTER(ctypes.c_size_t))
    size = ctypes.c_size_t()
    loaded.check(function(ctypes.byref(size)), "verify_mla_workspace")
    return size.value


def verify_workspace(device: torch.device | str) -> Tensor:
    """Return the workspace of `verify_mla` on a CUDA device: uint8, zero, about 11 MB.

    It serves calls of every size, one at a time: two streams need one each.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    with launching(device) as (loaded, _):
        size = _workspace_bytes(loaded, torch.cuda.current_device())
    return torch.zeros(size, dtype=torch.uint8, device=device)


def verify_mla(
    q: Tensor,
    kv_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_kv: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    workspace: Tensor,
    kv_scale: float = 1.0,
    q_indptr: Tensor | None = None,
    max_nodes: int | None = None,
    page_indptr: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    split: WorkSplit | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return softmax(scale * q k^T) v over each request's prefix and its visible step rows.

    T is the number of nodes of all requests, H of heads. All tensors contiguous, on one GPU.

    q: bfloat16 [T, H, 576], absorbed queries.
    kv_pool: bfloat16 or float8_e4m3fn, [slots, 576], or [pages, 64, 576]; a cached value is
        kv_scale times the stored one (1.0 for bfloat16).
    kv_indptr: int32 [batch + 1], prefix tokens of the requests, summed up.
    kv_indices: int32 or int64; the slot of every prefix token, in any order of slots; for pages,
        page numbers, the first token of a request at the start of its first page.
    page_indptr: int32 [batch + 1], where a request's pages start in kv_indices; pages only.
    tree_kv: bfloat16 [T, 576], this step's own rows.
    visible: int64 [T, ceil(nodes / 64)], bit j set if the node sees its request's node j, itself
        included; None is causal: node i sees nodes 0..i.
    q_indptr: int32 [batch + 1], where a request's nodes start, with max_nodes the largest number
        of them; None: T / batch nodes each.
    workspace: of `verify_workspace`.
    return_lse: also return the log-sum-exp (natural) of the scaled scores, float32 [T, H].
    out, lse: where to put the results; allocated if None.

    Result: bfloat16 [T, H, 512] and the log-sum-exp or None. A node that sees nothing gives 0 and
    -inf. With float8 the products run in float16: kv_pool is exact, and the step's rows, divided
    by kv_scale, must lie within float16's range. Reads no slot outside kv_indices. Lengths and
    indices may change between replays of a captured graph. The same input gives identical bits.

    Lengths and indices lie on the GPU, so no launch can refuse wrong ones. kv_indptr and q_indptr
    must not decrease and stay within kv_indices and T, no request may have more than max_nodes
    nodes, indices must lie in kv_pool. Otherwise lengths are cut to those bounds: results are
    wrong, but nothing hangs and nothing outside the outputs is written. With
    LONGLEAF_CHECK_LENGTHS=1 every call outside a graph capture reads them back, which waits for
    the GPU, and raises. NaN or infinity in a request stays in that request; in a tree row it may
    reach the request's nodes that do not see it.

    Raises ValueError or TypeError, naming the argument, before any launch.
    """
    check_no_grad(q=q, kv_pool=kv_pool, tree_kv=tree_kv, out=out, lse=lse)
    batch = _check_lengths(q, kv_indptr, q_indptr, max_nodes)
    nodes = max_nodes if max_nodes is not None else q.shape[0] // batch
    split = CHOSEN_BY_LIBRARY if split is None else split
    if not isinstance(split, WorkSplit):
        raise TypeError(f"split must be a WorkSplit, got {type(split).__name__}")
    for name, scalar in (("scale", scale), ("kv_scale", kv_scale)):
        check_scale(name, scalar)
    if not isinstance(workspace, Tensor):
        raise TypeError(f"workspace must be of verify_workspace, got {type(workspace).__name__}")
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty((tokens, heads, LATENT_DIM))
    if lse is None and return_lse:
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
    _verify_mla(
        q, kv_pool, kv_indptr, kv_indices, tree_kv, visible, q_indptr, page_indptr, out, lse,
        workspace, nodes, scale, kv_scale, split.row_groups, split.gang, split.min_tiles,
    )  # fmt: skip
    return out, lse


def _check_lengths(
    q: Tensor, kv_indptr: Tensor, q_indptr: Tensor | None, max_nodes: int | None
) -> int:
    """Check q and the row pointers; return the batch size."""
    device = check_cuda("q", q)
    check_tensor("q", q, torch.bfloat16, ["T", "H", ROW_DIM], device)
    tokens, heads, _ = q.shape
    check_range("heads", heads, 1, MAX_HEADS)
    if tokens < 1:
        raise ValueError("q must have at least one row, got 0")
    check_tensor("kv_indptr", kv_indptr, torch.int32, ["batch + 1"], device)
    batch: int = kv_indptr.shape[0] - 1
    check_range("batch", batch, 1, MAX_BATCH)
    if max_nodes is not None:
        check_integer("max_nodes", max_nodes)
    if q_indptr is None:
        if tokens % batch:
            raise ValueError(
                f"q has {tokens} rows, not a multiple of the {batch} requests of kv_indptr: "
                "pass q_indptr and max_nodes"
            )
        if max_nodes not in (None, tokens // batch):
            raise ValueError(f"max_nodes is {max_nodes}, q has {tokens // batch} rows a request")
        check_range("nodes", tokens // batch, 1, MAX_NODES)
        return batch
    check_tensor("q_indptr", q_indptr, torch.int32, [batch + 1], device)
    if max_nodes is None:
        raise ValueError("q_indptr needs max_nodes")
    check_range("max_nodes", max_nodes, 1, MAX_NODES)
    if not max_nodes <= tokens <= batch * max_nodes:
        raise ValueError(
            f"max_nodes is {max_nodes}: {batch} requests with one of that size have between "
            f"{max_nodes} and {batch * max_nodes} rows, q has {tokens}"
        )
    return batch


def _check_operands(
    q: Tensor,
    kv_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_kv: Tensor,
    visible: Tensor | None,
    q_indptr: Tensor | None,
    page_indptr: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    nodes: int,
    scale: float,
    kv_scale: float,
    row_groups: int,
    gang: int,
    min_tiles: int,
) -> None:
    """Check what the operator takes: all that can be known without addresses."""
    batch = _check_lengths(q, kv_indptr, q_indptr, nodes)
    tokens, heads, _ = q.shape
    device = q.device
    paged = kv_pool.dim() == 3
    shape: list[int | str] = ["pages", PAGE_SIZES[1], ROW_DIM] if paged else ["slots", ROW_DIM]
    check_tensor("kv_pool", kv_pool, _POOL_TYPES, shape, device)
    if kv_pool.shape[0] < 1:
        raise ValueError("kv_pool must have at least one slot, got 0")
    check_tensor("kv_indices", kv_indices, (torch.int32, torch.int64), ["n"], device)
    check_tensor("tree_kv", tree_kv, torch.bfloat16, [tokens, ROW_DIM], device)
    if visible is not None:
        check_tensor("visible", visible, torch.int64, [tokens, (nodes + 63) // 64], device)
    if paged != (page_indptr is not None):
        raise ValueError("page_indptr goes with a pool of pages, and only with one")
    if page_indptr is not None:
        check_tensor("page_indptr", page_indptr, torch.int32, [batch + 1], device)
    check_scale("scale", scale)
    check_scale("kv_scale", kv_scale)
    check_scale("scale times kv_scale", scale * kv_scale * LOG2_E)
    if kv_pool.dtype == torch.bfloat16 and kv_scale != 1.0:
        raise ValueError(f"kv_scale must be 1.0 for a bfloat16 pool, got {kv_scale}")
    _check_split(row_groups, gang, min_tiles)
    check_tensor("workspace", workspace, torch.uint8, ["bytes"], device)
    check_tensor("out", out, torch.bfloat16, [tokens, heads, LATENT_DIM], device)
    if lse is not None:
        check_tensor("lse", lse, torch.float32, [tokens, heads], device)


def check_lengths_on_device(
    kv_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    q_indptr: Tensor | None,
    page_indptr: Tensor | None,
    tokens: int,
    max_nodes: int,
) -> None:
    """Raise ValueError, naming the argument, for lengths or indices that `verify_mla` forbids.

    Waits for the device.
    """
    prefixes = _lengths_of("kv_indptr", kv_indptr)
    if q_indptr is not None:
        _check_end("q_indptr", q_indptr, tokens, "rows of q")
        largest = int(_lengths_of("q_indptr", q_indptr).max())
        if largest > max_nodes:
            raise ValueError(f"q_indptr has a request of {largest} nodes, max_nodes is {max_nodes}")
    entries = kv_indptr
    if page_indptr is not None:
        entries = page_indptr
        pages = _lengths_of("page_indptr", page_indptr)
        short = (pages * PAGE_SIZES[1] < prefixes).nonzero()
        if len(short):
            r = int(short[0])
            raise ValueError(
                f"page_indptr gives request {r} {int(pages[r])} pages for {int(prefixes[r])} tokens"
            )
    name = "kv_indptr" if page_indptr is None else "page_indptr"
    _check_end(name, entries, kv_indices.shape[0], "entries of kv_indices")
    used = kv_indices[int(entries[0]) : int(entries[-1])]
    limit = kv_pool.shape[0]
    wrong = ((used < 0) | (used >= limit)).nonzero()
    if len(wrong):
        value = int(used[wrong[0]])
        raise ValueError(f"kv_indices must be in [0, {limit - 1}], got {value}")


def _lengths_of(name: str, indptr: Tensor) -> Tensor:
    """Return the differences of row pointers that start at 0 or later and do not decrease."""
    values = indptr.to("cpu", torch.int64)
    lengths = values.diff()
    if int(values[0]) < 0 or int(lengths.min()) < 0:
        raise ValueError(f"{name} must start at 0 and not decrease, got {values.tolist()}")
    return lengths


def _check_end(name: str, indptr: Tensor, limit: int, what: str) -> None:
    if int(indptr[-1]) > limit:
        raise ValueError(f"{name} ends at {int(indptr[-1])}, there are {limit} {what}")


@torch.library.custom_op("longleaf::verify_mla", mutates_args=("out", "lse", "workspace"))
def _verify_mla(
    q: Tensor,
    kv_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_kv: Tensor,
    visible: Tensor | None,
    q_indptr: Tensor | None,
    page_indptr: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    nodes: int,
    scale: float,
    kv_scale: float,
    row_groups: int,
    gang: int,
    min_tiles: int,
) -> None:
    _check_operands(
        q, kv_pool, kv_indptr, kv_indices, tree_kv, visible, q_indptr, page_indptr, out, lse,
        workspace, nodes, scale, kv_scale, row_groups, gang, min_tiles,
    )  # fmt: skip
    # Here alone: a traced size is to stay free of such bounds.
    check_range("slots of kv_pool", kv_pool.numel() // ROW_DIM, 1, MAX_INT32)
    check_range("entries of kv_indices", kv_indices.shape[0], 0, MAX_INT32)
    aligned = {"q": q, "kv_pool": kv_pool, "tree_kv": tree_kv, "out": out, "workspace": workspace}
    for name, tensor in aligned.items():
        check_aligned(name, tensor)
    check_apart(
        {"out": out, "lse": lse, "workspace": workspace},
        {
            "q": q, "kv_pool": kv_pool, "kv_indptr": kv_indptr, "kv_indices": kv_indices,
            "tree_kv": tree_kv, "visible": visible, "q_indptr": q_indptr,
            "page_indptr": page_indptr,
        },
    )  # fmt: skip
    if os.environ.get(CHECK_VARIABLE) == "1" and not torch.cuda.is_current_stream_capturing():
        check_lengths_on_device(
            kv_pool, kv_indptr, kv_indices, q_indptr, page_indptr, q.shape[0], nodes
        )
    arguments = _Arguments(
        q=q.data_ptr(),
        kv_pool=kv_pool.data_ptr(),
        kv_indptr=kv_indptr.data_ptr(),
        # An empty tensor has no address; nothing is read from it.
        kv_indices=kv_indices.data_ptr() or workspace.data_ptr(),
        page_indptr=None if page_indptr is None else page_indptr.data_ptr(),
        tree_kv=tree_kv.data_ptr(),
        visible=None if visible is None else visible.data_ptr(),
        q_indptr=None if q_indptr is None else q_indptr.data_ptr(),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        workspace=workspace.data_ptr(),
        tokens=q.shape[0],
        slots=kv_pool.numel() // ROW_DIM,
        indices=kv_indices.shape[0],
        batch=kv_indptr.shape[0] - 1,
        nodes=nodes,
        heads=q.shape[1],
        page_size=PAGE_SIZES[kv_pool.dim() == 3],
        wide_indices=kv_indices.dtype == torch.int64,
        e4m3=kv_pool.dtype == torch.float8_e4m3fn,
        softmax_scale=scale,
        kv_scale=kv_scale,
        row_groups=row_groups,
        gang=gang,
        min_tiles=min_tiles,
    )
    with launching(q.device) as (loaded, stream):
        needed = _workspace_bytes(loaded, torch.cuda.current_device())
        if workspace.numel() < needed:
            raise ValueError(
                f"workspace must have {needed} bytes on this device, got {workspace.numel()}: "
                "use verify_workspace"
            )
        function = loaded.function(
            "longleaf_verify_mla", ctypes.POINTER(_Arguments), ctypes.c_void_p
        )
        loaded.check(function(ctypes.byref(arguments), stream), "verify_mla")


@_verify_mla.register_fake
def _(
    q: Tensor,
    kv_pool: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_kv: Tensor,
    visible: Tensor | None,
    q_indptr: Tensor | None,
    page_indptr: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    nodes: int,
    scale: float,
    kv_scale: float,
    row_groups: int,
    gang: int,
    min_tiles: int,
) -> None:
    """Check; everything is written in place."""
    _check_operands(
        q, kv_pool, kv_indptr, kv_indices, tree_kv, visible, q_indptr, page_indptr, out, lse,
        workspace, nodes, scale, kv_scale, row_groups, gang, min_tiles,
    )  # fmt: skip
