"""Verify attention: every node of a step's trees over an MLA cache, in one launch.

The same operator serves plain decode (one node a request) and a causal extend of new tokens over a
cached prefix (`visible=None`).
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from longleaf_kernels._checks import check_cuda, check_range, check_tensor
from longleaf_kernels._launch import launching
from longleaf_kernels._library import Library

LATENT_DIM = 512
ROW_DIM = 576
"""One cached token: 512 latent and 64 rotary dimensions; the value is the first 512."""
PAGE_SIZES = (1, 64)
MAX_BATCH = 1024
MAX_NODES = 512
MAX_HEADS = 128
_POOL_TYPES = (torch.bfloat16, torch.float8_e4m3fn)


class _Arguments(ctypes.Structure):
    """longleaf_verify_mla_args of csrc/verify_mla.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_pool", "kv_indptr", "kv_indices")),
        *((name, ctypes.c_void_p) for name in ("page_indptr", "tree_kv", "visible", "q_indptr")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "workspace")),
        *((name, ctypes.c_int64) for name in ("tokens", "slots")),
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

    Raises ValueError or TypeError, naming the argument, before any launch.
    """
    batch = _check_lengths(q, kv_indptr, q_indptr, max_nodes)
    nodes = max_nodes if max_nodes is not None else q.shape[0] // batch
    check_range("max_nodes" if q_indptr is not None else "nodes", nodes, 1, MAX_NODES)
    _check_tensors(q, kv_pool, kv_indices, tree_kv, visible, page_indptr, batch, nodes)
    for name, value in (("scale", scale), ("kv_scale", kv_scale)):
        if not 0.0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if kv_pool.dtype == torch.bfloat16 and kv_scale != 1.0:
        raise ValueError(f"kv_scale must be 1.0 for a bfloat16 pool, got {kv_scale}")
    check_tensor("workspace", workspace, torch.uint8, ["bytes"], q.device)
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty((tokens, heads, LATENT_DIM))
    check_tensor("out", out, torch.bfloat16, [tokens, heads, LATENT_DIM], q.device)
    if lse is None and return_lse:
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if lse is not None:
        check_tensor("lse", lse, torch.float32, [tokens, heads], q.device)
    chosen = split or WorkSplit()
    _verify_mla(
        q, kv_pool, kv_indptr, kv_indices, tree_kv, visible, q_indptr, page_indptr, out, lse,
        workspace, nodes, scale, kv_scale, chosen.row_groups, chosen.gang, chosen.min_tiles,
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
    check_tensor("kv_indptr", kv_indptr, torch.int32, ["batch + 1"], device)
    batch: int = kv_indptr.shape[0] - 1
    check_range("batch", batch, 1, MAX_BATCH)
    if q_indptr is None:
        if tokens == 0 or tokens % batch:
            raise ValueError(
                f"q has {tokens} rows, not a multiple of the {batch} requests of kv_indptr: "
                "pass q_indptr and max_nodes"
            )
        if max_nodes not in (None, tokens // batch):
            raise ValueError(f"max_nodes is {max_nodes}, q has {tokens // batch} rows a request")
    else:
        check_tensor("q_indptr", q_indptr, torch.int32, [batch + 1], device)
        if max_nodes is None:
            raise ValueError("q_indptr needs max_nodes")
    return batch


def _check_tensors(
    q: Tensor,
    kv_pool: Tensor,
    kv_indices: Tensor,
    tree_kv: Tensor,
    visible: Tensor | None,
    page_indptr: Tensor | None,
    batch: int,
    nodes: int,
) -> None:
    paged = kv_pool.dim() == 3
    shape: list[int | str] = ["pages", PAGE_SIZES[1], ROW_DIM] if paged else ["slots", ROW_DIM]
    check_tensor("kv_pool", kv_pool, _POOL_TYPES, shape, q.device)
    check_tensor("kv_indices", kv_indices, (torch.int32, torch.int64), ["n"], q.device)
    check_tensor("tree_kv", tree_kv, torch.bfloat16, [q.shape[0], ROW_DIM], q.device)
    if visible is not None:
        words = (nodes + 63) // 64
        check_tensor("visible", visible, torch.int64, [q.shape[0], words], q.device)
    if paged != (page_indptr is not None):
        raise ValueError("page_indptr goes with a pool of pages, and only with one")
    if page_indptr is not None:
        check_tensor("page_indptr", page_indptr, torch.int32, [batch + 1], q.device)


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
    """Everything is written in place."""
