"""Accept on the GPU: operators longleaf::accept_greedy and accept_sampled.

The walk of longleaf.ddtree: from the root down, along the target's own choice at each node, for
as long as a child carries it. Sampled choices are inverse-CDF draws with the caller's uniforms;
a token can differ from the float64 definition only where the uniform lies within rounding of a
border between two tokens (about 1e-6 of the mass).
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf_kernels._checks import check_cuda, check_range, check_tensor
from longleaf_kernels._launch import launching
from longleaf_kernels._library import KernelError, Library, library
from longleaf_kernels._tree import LOGIT_TYPES, MAX_BATCH, MAX_BUDGET

MAX_NODES = MAX_BUDGET + 1
MAX_VOCABULARY = 1 << 22
"""Of a sampled accept: its sums of weights are 64-bit integers."""
NODES_PER_MULTIPROCESSOR = 1
"""Up to this load a draw at every node at once is faster than draws along the walk."""


class Accepted(NamedTuple):
    """What each request accepted.

    path: int32[batch, max_path], node ids from the root down, ascending, -1 from path_len on.
    path_len: int32[batch], at least 1. bonus: int64[batch], the target's token after the last
    accepted node. The step commits the tokens of path[1:path_len], then the bonus.
    """

    path: Tensor
    path_len: Tensor
    bonus: Tensor


class SamplingTensors(NamedTuple):
    """Sampling parameters, one entry a request, as longleaf.ddtree.SamplingParams takes them.

    temperature, top_p, min_p: float32[batch]; top_k: int32[batch], below 1 for the whole
    vocabulary. Temperature below 1e-6 or top_k 1 is greedy. The device checks no ranges.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


def accept_greedy(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int | None = None
) -> Accepted:
    """Accept the longest path on which each node's child is the target's argmax there.

    tokens: int64[batch, n] and parents: int32[batch, n] of `DraftTrees`. target_tokens:
    int64[batch, n], the target's most probable token after each node. A walk stops after
    max_path nodes (n if None): block size is enough for a tree of block - 1 depths.
    """
    width = tokens.shape[-1] if max_path is None else max_path
    return Accepted(*torch.ops.longleaf.accept_greedy(tokens, parents, target_tokens, width))


def accept_sampled(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logits: Tensor,
    sampling: SamplingTensors,
    uniforms: Tensor,
    workspace: Tensor | None = None,
    every_node: bool | None = None,
) -> Accepted:
    """Accept by drawing the target's own token at each node, going down iff a child carries it.

    tokens, parents, depths: of `DraftTrees`. logits: float32 or bfloat16 [batch, n, vocabulary]
    of the target after each node, last dimension contiguous, [batch, n] one stride. uniforms:
    float64[batch, max_path] in [0, 1]; entry d draws the token after the node of depth d, and a
    walk stops after max_path nodes. A row without a finite maximum gives its argmax.
    workspace: from `accept_workspace`, to reuse between calls and in graphs; made if None.
    every_node: draw at all nodes in parallel, or else along the walk; the answer is the same.
    None takes what is faster for the size.
    """
    if workspace is None:
        batch, nodes = tokens.shape
        workspace = accept_workspace(batch, nodes, tokens.device)
    out = torch.ops.longleaf.accept_sampled(
        tokens, parents, depths, logits, *sampling, uniforms, workspace, every_node
    )
    return Accepted(*out)


def accept_workspace(batch: int, nodes: int, device: torch.device | str) -> Tensor:
    """Return a workspace, uint8, for `accept_sampled` of that size, one launch at a time."""
    _check_sizes(batch, nodes)
    return torch.zeros(workspace_bytes(library(), batch, nodes), dtype=torch.uint8, device=device)


class _Walk(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("nodes", ctypes.c_int32),
        ("max_path", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("path", ctypes.c_void_p),
        ("path_len", ctypes.c_void_p),
        ("bonus", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, tokens: Tensor, parents: Tensor, out: Accepted) -> "_Walk":
        batch, nodes = tokens.shape
        results = (tensor.data_ptr() for tensor in out)
        trees = tokens.data_ptr(), parents.data_ptr()
        return cls(*trees, batch, nodes, out.path.shape[1], 0, *results)


class _AcceptSampledArgs(ctypes.Structure):
    _fields_ = (
        ("walk", _Walk),
        ("depths", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_type", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("row_stride", ctypes.c_int64),
        ("temperature", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
        ("every_node", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    )


def draws_every_node(nodes: int, device: torch.device) -> bool:
    """Return whether a draw at all of so many nodes at once is faster than along the walk."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return bool(nodes <= NODES_PER_MULTIPROCESSOR * processors)


def launch_accept_greedy(
    loaded: Library,
    stream: int,
    tokens: Tensor,
    parents: Tensor,
    target_tokens: Tensor,
    max_path: int,
) -> Accepted:
    """Check, allocate and launch on a given library."""
    _check_greedy(tokens, parents, target_tokens, max_path)
    out = _empty(tokens, max_path)
    function = loaded.function(
        "longleaf_accept_greedy", ctypes.POINTER(_Walk), ctypes.c_void_p, ctypes.c_void_p
    )
    status = function(_Walk.of(tokens, parents, out), target_tokens.data_ptr(), stream)
    loaded.check(status, "accept_greedy")
    return out


def launch_accept_sampled(
    loaded: Library,
    stream: int,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logits: Tensor,
    sampling: SamplingTensors,
    uniforms: Tensor,
    workspace: Tensor,
    every_node: bool,
) -> Accepted:
    """Check, allocate and launch on a given library."""
    _check_sampled(tokens, parents, depths, logits, sampling, uniforms, workspace)
    batch, nodes, vocabulary = logits.shape
    needed = workspace_bytes(loaded, batch, nodes)
    if workspace.numel() < needed:
        raise ValueError(f"workspace must hold {needed} bytes, got {workspace.numel()}")
    out = _empty(tokens, uniforms.shape[1])
    args = _AcceptSampledArgs(
        walk=_Walk.of(tokens, parents, out),
        depths=depths.data_ptr(),
        logits=logits.data_ptr(),
        logits_type=LOGIT_TYPES.index(logits.dtype),
        vocabulary=vocabulary,
        row_stride=logits.stride(1),
        temperature=sampling.temperature.data_ptr(),
        top_p=sampling.top_p.data_ptr(),
        min_p=sampling.min_p.data_ptr(),
        top_k=sampling.top_k.data_ptr(),
        uniforms=uniforms.data_ptr(),
        every_node=every_node,
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
    )
    function = loaded.function(
        "longleaf_accept_sampled", ctypes.POINTER(_AcceptSampledArgs), ctypes.c_void_p
    )
    loaded.check(function(args, stream), "accept_sampled")
    return out


def workspace_bytes(loaded: Library, batch: int, nodes: int) -> int:
    """Return the bytes of workspace that a sampled accept of that size needs."""
    function = loaded.function(
        "longleaf_accept_sampled_workspace", ctypes.c_int, ctypes.c_int, returns=ctypes.c_size_t
    )
    size = function(batch, nodes)
    if size == 0:
        raise KernelError(f"accept_sampled takes no {batch} trees of {nodes} nodes")
    return size


def _check_sizes(batch: int, nodes: int) -> None:
    check_range("batch", batch, 0, MAX_BATCH)
    check_range("nodes", nodes, 1, MAX_NODES)


def _check_trees(tokens: Tensor, parents: Tensor) -> None:
    check_tensor("tokens", tokens, torch.int64, ["batch", "n"], tokens.device)
    _check_sizes(*tokens.shape)
    check_tensor("parents", parents, torch.int32, list(tokens.shape), tokens.device)


def _check_greedy(tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int) -> None:
    _check_trees(tokens, parents)
    check_tensor("target_tokens", target_tokens, torch.int64, list(tokens.shape), tokens.device)
    check_range("max_path", max_path, 1, MAX_NODES)


def _check_sampled(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logits: Tensor,
    sampling: SamplingTensors,
    uniforms: Tensor,
    workspace: Tensor,
) -> None:
    device = tokens.device
    _check_trees(tokens, parents)
    batch, nodes = tokens.shape
    check_tensor("depths", depths, torch.int32, [batch, nodes], device)
    check_tensor(
        "logits", logits, LOGIT_TYPES, [batch, nodes, "vocabulary"], device, contiguous=False
    )
    check_range("vocabulary", logits.shape[2], 1, MAX_VOCABULARY)
    if batch > 1 and logits.stride(0) != nodes * logits.stride(1):
        raise ValueError(
            f"logits must be rows of one stride, got strides {list(logits.stride())} for "
            f"{list(logits.shape)}"
        )
    for name, tensor in zip(SamplingTensors._fields, sampling, strict=True):
        dtype = torch.int32 if name == "top_k" else torch.float32
        check_tensor(name, tensor, dtype, [batch], device)
    check_tensor("uniforms", uniforms, torch.float64, [batch, "max_path"], device)
    check_range("max_path", uniforms.shape[1], 1, MAX_NODES)
    check_tensor("workspace", workspace, torch.uint8, ["bytes"], device)


def _empty(tokens: Tensor, max_path: int) -> Accepted:
    batch = tokens.shape[0]
    return Accepted(
        path=tokens.new_empty(batch, max_path, dtype=torch.int32),
        path_len=tokens.new_empty(batch, dtype=torch.int32),
        bonus=tokens.new_empty(batch),
    )


@torch.library.custom_op("longleaf::accept_greedy", mutates_args=())
def _accept_greedy(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int
) -> tuple[Tensor, Tensor, Tensor]:
    with launching(check_cuda("tokens", tokens)) as (loaded, stream):
        return launch_accept_greedy(loaded, stream, tokens, parents, target_tokens, max_path)


@_accept_greedy.register_fake
def _(tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int) -> Accepted:
    _check_greedy(tokens, parents, target_tokens, max_path)
    return _empty(tokens, max_path)


@torch.library.custom_op("longleaf::accept_sampled", mutates_args=("workspace",))
def _accept_sampled(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    workspace: Tensor,
    every_node: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    device = check_cuda("tokens", tokens)
    if every_node is None:
        every_node = draws_every_node(tokens.numel(), device)
    with launching(device) as (loaded, stream):
        return launch_accept_sampled(
            loaded,
            stream,
            tokens,
            parents,
            depths,
            logits,
            SamplingTensors(temperature, top_p, top_k, min_p),
            uniforms,
            workspace,
            every_node,
        )


@_accept_sampled.register_fake
def _(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    workspace: Tensor,
    every_node: bool | None,
) -> Accepted:
    sampling = SamplingTensors(temperature, top_p, top_k, min_p)
    _check_sampled(tokens, parents, depths, logits, sampling, uniforms, workspace)
    return _empty(tokens, uniforms.shape[1])
