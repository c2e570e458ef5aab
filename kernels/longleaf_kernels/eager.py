"""The step's small operators launched without torch's dispatcher, for code that runs eagerly.

An operator defined in Python costs the CPU several times what its launch does: dispatch, the check
of what it mutates, and outside inference mode a layer of autograd. Arguments, checks, results and
kernels are the operators' own. Nothing here can be traced or exported.
"""

from torch import Tensor

from longleaf_kernels._checks import check_cuda
from longleaf_kernels._launch import launching
from longleaf_kernels._tree import DraftTrees, launch_expand_tree
from longleaf_kernels.accept import (
    Accepted,
    SamplingTensors,
    draws_every_node,
    launch_accept_greedy,
    launch_accept_sampled,
)
from longleaf_kernels.compact import CompactPlan

__all__ = ["CompactPlan", "accept_greedy", "accept_sampled", "expand_tree"]


def expand_tree(
    tokens: Tensor,
    log_probs: Tensor,
    root_tokens: Tensor,
    budget: int,
    seed_chain: bool,
    prefix_lens: Tensor,
) -> DraftTrees:
    """Launch `longleaf_kernels.expand_tree`."""
    with launching(check_cuda("tokens", tokens)) as (loaded, stream):
        return launch_expand_tree(
            loaded, stream, tokens, log_probs, root_tokens, prefix_lens, budget, seed_chain
        )


def accept_greedy(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int
) -> Accepted:
    """Launch `longleaf_kernels.accept_greedy`."""
    with launching(check_cuda("tokens", tokens)) as (loaded, stream):
        return launch_accept_greedy(loaded, stream, tokens, parents, target_tokens, max_path)


def accept_sampled(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logits: Tensor,
    sampling: SamplingTensors,
    uniforms: Tensor,
    workspace: Tensor,
) -> Accepted:
    """Launch `longleaf_kernels.accept_sampled`, in the order of draws that is faster."""
    device = check_cuda("tokens", tokens)
    every_node = draws_every_node(tokens.numel(), device)
    with launching(device) as (loaded, stream):
        return launch_accept_sampled(
            loaded,
            stream,
            tokens,
            parents,
            depths,
            logits,
            sampling,
            uniforms,
            workspace,
            every_node,
        )
