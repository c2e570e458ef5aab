"""Draft trees on the GPU: operators longleaf::build_tree, expand_tree and top_k_marginals.

They agree with longleaf.ddtree: `expand_tree` gives, bit for bit, the tree of
`ddtree.build_tree` on the same marginals; `build_tree` gives that tree on its own marginals,
which it returns, and whose tokens are those of `ddtree.top_k_marginals` and whose
log-probabilities differ from it by rounding (float32 exponentials, about 1e-6).
"""

import torch
from torch import Tensor

from longleaf_kernels._checks import check_cuda, check_integer, check_no_grad, check_range
from longleaf_kernels._launch import launching
from longleaf_kernels._library import library
from longleaf_kernels._tree import (
    MAX_BUDGET,
    DraftTrees,
    Marginals,
    check_build,
    check_expand,
    check_sizes,
    empty_marginals,
    empty_trees,
    launch_build_tree,
    launch_expand_tree,
    marginal_width,
    workspace_bytes,
)


def build_tree(
    logits: Tensor,
    root_tokens: Tensor,
    budget: int,
    seed_chain: bool = True,
    prefix_lens: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[DraftTrees, Marginals]:
    """Build the tree of the `budget` most probable prefixes of each request, in one launch.

    logits: float32 or bfloat16 [batch, depth, vocabulary], row d for depth d + 1, last dimension
    contiguous. -inf marks an impossible token; a row whose maximum is not finite ends the tree
    above it (NaN ranks as -inf). root_tokens: int64[batch]. prefix_lens: int64[batch], zeros if
    None. budget at most 127, depth 15, batch 256, vocabulary 524,288.
    workspace: from `build_tree_workspace`, to reuse between calls and in graphs; made if None.
    """
    check_no_grad(logits=logits)
    if workspace is None:
        check_cuda("logits", logits)
        check_build(logits, root_tokens, prefix_lens, None, budget)
        batch, depth, vocabulary = logits.shape
        workspace = build_tree_workspace(batch, depth, vocabulary, budget, logits.device)
    out = torch.ops.longleaf.build_tree(
        logits, root_tokens, prefix_lens, workspace, budget, seed_chain
    )
    return DraftTrees(*out[:7]), Marginals(*out[7:])


def build_tree_workspace(
    batch: int, depth: int, vocabulary: int, budget: int, device: torch.device | str
) -> Tensor:
    """Return a workspace, uint8, for `build_tree` of that size or smaller, one launch at a time."""
    check_sizes(batch, depth, vocabulary, budget)
    torch.empty(0, device=device)  # a missing GPU comes before a missing library
    width = marginal_width(vocabulary, budget)
    size = workspace_bytes(library(), batch, depth, vocabulary, width)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def top_k_marginals(logits: Tensor, k: int, workspace: Tensor | None = None) -> Marginals:
    """Return the marginals that `build_tree` of budget k starts from; arguments as there."""
    check_no_grad(logits=logits)
    check_integer("k", k)
    check_range("k", k, 1, MAX_BUDGET)
    if workspace is None:
        check_cuda("logits", logits)
        check_build(logits, None, None, None, k)
        batch, depth, vocabulary = logits.shape
        workspace = build_tree_workspace(batch, depth, vocabulary, k, logits.device)
    return Marginals(*torch.ops.longleaf.top_k_marginals(logits, workspace, k))


def expand_tree(
    tokens: Tensor,
    log_probs: Tensor,
    root_tokens: Tensor,
    budget: int,
    seed_chain: bool = True,
    prefix_lens: Tensor | None = None,
) -> DraftTrees:
    """Build the trees of given marginals, bit for bit `longleaf.ddtree.build_tree`'s.

    tokens: int64[batch, depth, k], distinct within a row; log_probs: float64[batch, depth, k],
    at most 0 and descending (the device does not check). Other arguments as in `build_tree`.
    """
    check_no_grad(log_probs=log_probs)
    return DraftTrees(
        *torch.ops.longleaf.expand_tree(
            tokens, log_probs, root_tokens, prefix_lens, budget, seed_chain
        )
    )


@torch.library.custom_op("longleaf::build_tree", mutates_args=("workspace",))
def _build_tree(
    logits: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor | None,
    workspace: Tensor,
    budget: int,
    seed_chain: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with launching(check_cuda("logits", logits)) as (loaded, stream):
        trees, marginals = launch_build_tree(
            loaded, stream, logits, root_tokens, prefix_lens, workspace, budget, seed_chain
        )
    assert trees is not None
    return (*trees, *marginals)


@_build_tree.register_fake
def _(
    logits: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor | None,
    workspace: Tensor,
    budget: int,
    seed_chain: bool,
) -> tuple[Tensor, ...]:
    check_build(logits, root_tokens, prefix_lens, workspace, budget)
    width = marginal_width(logits.shape[2], budget)
    return (*empty_trees(logits, budget), *empty_marginals(logits, width))


@torch.library.custom_op("longleaf::top_k_marginals", mutates_args=("workspace",))
def _top_k_marginals(logits: Tensor, workspace: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    with launching(check_cuda("logits", logits)) as (loaded, stream):
        _, marginals = launch_build_tree(loaded, stream, logits, None, None, workspace, k)
    return marginals


@_top_k_marginals.register_fake
def _(logits: Tensor, workspace: Tensor, k: int) -> tuple[Tensor, ...]:
    check_build(logits, None, None, workspace, k)
    return empty_marginals(logits, marginal_width(logits.shape[2], k))


@torch.library.custom_op("longleaf::expand_tree", mutates_args=())
def _expand_tree(
    tokens: Tensor,
    log_probs: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor | None,
    budget: int,
    seed_chain: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with launching(check_cuda("tokens", tokens)) as (loaded, stream):
        return launch_expand_tree(
            loaded, stream, tokens, log_probs, root_tokens, prefix_lens, budget, seed_chain
        )


@_expand_tree.register_fake
def _(
    tokens: Tensor,
    log_probs: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor | None,
    budget: int,
    seed_chain: bool,
) -> tuple[Tensor, ...]:
    check_expand(tokens, log_probs, root_tokens, prefix_lens, budget)
    return empty_trees(tokens, budget)
