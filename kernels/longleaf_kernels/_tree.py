"""How the tree operators reach the library: result types, checks, C structures, launches."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf_kernels._checks import check_integer, check_range, check_tensor
from longleaf_kernels._library import KernelError, Library

MAX_BATCH = 256
MAX_BUDGET = 127
MAX_DEPTH = 15
MAX_VOCABULARY = 64 * 8192
LOGIT_TYPES = (torch.float32, torch.bfloat16)
WORD_BITS = 64


class DraftTrees(NamedTuple):
    """One tree a request, padded to n = budget + 1 nodes; node 0 is the root.

    tokens: int64[batch, n]. parents: int32[batch, n], -1 for the root. depths: int32[batch, n].
    visible: int64[batch, n, ceil(n / 64)], bit j % 64 of word j // 64 in row i is set iff node i
    sees node j: ancestors and self. positions: int64[batch, n], prefix length + depth.
    log_probs: float64[batch, n], of the prefix that ends in the node. count: int32[batch], nodes
    in the tree; rows from count on hold the root's token at the root's position with parent -1,
    log-probability -inf and themselves alone to see, so that they are safe to verify.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor
    positions: Tensor
    log_probs: Tensor
    count: Tensor


class Marginals(NamedTuple):
    """The k most probable tokens of each depth, descending, equal logits by lower id.

    tokens: int64[batch, depth, k]. log_probs: float64[batch, depth, k] over the row given.
    log_sum_exp: float64[batch, depth] of the row's logits, to merge parts of a vocabulary.
    """

    tokens: Tensor
    log_probs: Tensor
    log_sum_exp: Tensor


class _TreeOutput(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in DraftTrees._fields)

    @classmethod
    def of(cls, trees: DraftTrees) -> "_TreeOutput":
        return cls(*(tensor.data_ptr() for tensor in trees))


class _BuildTreeArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("logits_type", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("batch_stride", ctypes.c_int64),
        ("depth_stride", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("seed_chain", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("root_tokens", ctypes.c_void_p),
        ("prefix_lens", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("top_tokens", ctypes.c_void_p),
        ("top_log_probs", ctypes.c_void_p),
        ("log_sum_exp", ctypes.c_void_p),
        ("output", _TreeOutput),
    )


class _ExpandTreeArgs(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("log_probs", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("seed_chain", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("root_tokens", ctypes.c_void_p),
        ("prefix_lens", ctypes.c_void_p),
        ("output", _TreeOutput),
    )


def launch_build_tree(
    loaded: Library,
    stream: int,
    logits: Tensor,
    root_tokens: Tensor | None,
    prefix_lens: Tensor | None,
    workspace: Tensor,
    budget: int,
    seed_chain: bool = True,
) -> tuple[DraftTrees | None, Marginals]:
    """Check, allocate and launch on a given library; without root tokens, marginals alone."""
    check_build(logits, root_tokens, prefix_lens, workspace, budget)
    batch, depth, vocabulary = logits.shape
    width = marginal_width(vocabulary, budget)
    needed = workspace_bytes(loaded, batch, depth, vocabulary, width)
    if workspace.numel() < needed:
        raise ValueError(f"workspace must hold {needed} bytes, got {workspace.numel()}")
    marginals = empty_marginals(logits, width)
    trees = None if root_tokens is None else empty_trees(logits, budget)
    args = _BuildTreeArgs(
        logits=logits.data_ptr(),
        logits_type=LOGIT_TYPES.index(logits.dtype),
        batch=batch,
        depth=depth,
        vocabulary=vocabulary,
        batch_stride=logits.stride(0),
        depth_stride=logits.stride(1),
        width=width,
        budget=-1 if trees is None else budget,
        seed_chain=seed_chain,
        root_tokens=None if root_tokens is None else root_tokens.data_ptr(),
        prefix_lens=None if prefix_lens is None else prefix_lens.data_ptr(),
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        top_tokens=marginals.tokens.data_ptr(),
        top_log_probs=marginals.log_probs.data_ptr(),
        log_sum_exp=marginals.log_sum_exp.data_ptr(),
    )
    if trees is not None:
        args.output = _TreeOutput.of(trees)
    function = loaded.function(
        "longleaf_build_tree", ctypes.POINTER(_BuildTreeArgs), ctypes.c_void_p
    )
    loaded.check(function(args, stream), "build_tree")
    return trees, marginals


def launch_expand_tree(
    loaded: Library,
    stream: int,
    tokens: Tensor,
    log_probs: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor | None,
    budget: int,
    seed_chain: bool = True,
) -> DraftTrees:
    """Check, allocate and launch on a given library."""
    check_expand(tokens, log_probs, root_tokens, prefix_lens, budget)
    trees = empty_trees(tokens, budget)
    batch, depth, width = tokens.shape
    args = _ExpandTreeArgs(
        tokens=tokens.data_ptr(),
        log_probs=log_probs.data_ptr(),
        batch=batch,
        depth=depth,
        width=width,
        budget=budget,
        seed_chain=seed_chain,
        root_tokens=root_tokens.data_ptr(),
        prefix_lens=None if prefix_lens is None else prefix_lens.data_ptr(),
        output=_TreeOutput.of(trees),
    )
    function = loaded.function(
        "longleaf_expand_tree", ctypes.POINTER(_ExpandTreeArgs), ctypes.c_void_p
    )
    loaded.check(function(args, stream), "expand_tree")
    return trees


def marginal_width(vocabulary: int, budget: int) -> int:
    """Return how many candidates of a depth a tree can need: no node's rank reaches the budget."""
    return torch.sym_min(max(budget, 1), vocabulary)  # type: ignore[no-any-return]


def workspace_bytes(loaded: Library, batch: int, depth: int, vocabulary: int, width: int) -> int:
    """Return the bytes of workspace that a launch of that size needs."""
    function = loaded.function(
        "longleaf_build_tree_workspace", *[ctypes.c_int] * 4, returns=ctypes.c_size_t
    )
    size = function(batch, depth, vocabulary, width)
    if size == 0:
        raise KernelError(f"build_tree takes no {batch} x {depth} x {vocabulary}, k {width}")
    return size


def check_sizes(batch: int, depth: int, vocabulary: int, budget: int) -> None:
    """Raise ValueError unless there is a kernel for these sizes."""
    check_range("batch", batch, 0, MAX_BATCH)
    check_range("depth", depth, 1, MAX_DEPTH)
    check_range("vocabulary", vocabulary, 1, MAX_VOCABULARY)
    check_integer("budget", budget)
    check_range("budget", budget, 0, MAX_BUDGET)


def _check_requests(
    batch: int, device: torch.device, root_tokens: Tensor | None, prefix_lens: Tensor | None
) -> None:
    if root_tokens is not None:
        check_tensor("root_tokens", root_tokens, torch.int64, [batch], device)
    if prefix_lens is not None:
        check_tensor("prefix_lens", prefix_lens, torch.int64, [batch], device)


def check_build(
    logits: Tensor,
    root_tokens: Tensor | None,
    prefix_lens: Tensor | None,
    workspace: Tensor | None,
    budget: int,
) -> None:
    """Raise unless `build_tree` takes these; a workspace of None is yet to be made."""
    device = logits.device
    check_tensor(
        "logits", logits, LOGIT_TYPES, ["batch", "depth", "vocabulary"], device, contiguous=False
    )
    batch, depth, vocabulary = logits.shape
    check_sizes(batch, depth, vocabulary, budget)
    _check_requests(batch, device, root_tokens, prefix_lens)
    if workspace is not None:
        check_tensor("workspace", workspace, torch.uint8, ["bytes"], device)


def check_expand(
    tokens: Tensor,
    log_probs: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor | None,
    budget: int,
) -> None:
    """Raise unless `expand_tree` takes these."""
    device = tokens.device
    check_tensor("tokens", tokens, torch.int64, ["batch", "depth", "k"], device)
    batch, depth, width = tokens.shape
    check_tensor("log_probs", log_probs, torch.float64, list(tokens.shape), device)
    check_sizes(batch, depth, width, budget)
    _check_requests(batch, device, root_tokens, prefix_lens)


def empty_trees(like: Tensor, budget: int) -> DraftTrees:
    """Return uninitialised trees for the requests of `like` [batch, ...], on its device."""
    batch, nodes = like.shape[0], budget + 1
    words = -(-nodes // WORD_BITS)
    return DraftTrees(
        tokens=like.new_empty(batch, nodes, dtype=torch.int64),
        parents=like.new_empty(batch, nodes, dtype=torch.int32),
        depths=like.new_empty(batch, nodes, dtype=torch.int32),
        visible=like.new_empty(batch, nodes, words, dtype=torch.int64),
        positions=like.new_empty(batch, nodes, dtype=torch.int64),
        log_probs=like.new_empty(batch, nodes, dtype=torch.float64),
        count=like.new_empty(batch, dtype=torch.int32),
    )


def empty_marginals(logits: Tensor, width: int) -> Marginals:
    """Return uninitialised marginals of logits [batch, depth, vocabulary], on their device."""
    batch, depth = logits.shape[:2]
    return Marginals(
        tokens=logits.new_empty(batch, depth, width, dtype=torch.int64),
        log_probs=logits.new_empty(batch, depth, width, dtype=torch.float64),
        log_sum_exp=logits.new_empty(batch, depth, dtype=torch.float64),
    )
