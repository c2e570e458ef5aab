"""Random inputs of a problem, and the layers' buffers that launches rotate over."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_bench.cases import LATENT_DIM, LAYERS, ROW_DIM, SLOTS, Problem

SCALE = 192**-0.5
"""Softmax scale of the model's 128 + 64 dimensions a head, before absorption."""


@dataclass(frozen=True)
class Inputs:
    """What every contender gets. T = batch x nodes.

    q bfloat16 [T, H, 576]; indptr int32 [batch + 1]; indices int64 [tokens], slots in random
    order; spare_slots int64 [batch], one more for each request; tree_kv bfloat16 [T, 576]; dense
    bool [nodes, nodes], what node i sees, of every request; visible int64 [T, words], the same as
    bits; out bfloat16 [T, H, 512].
    """

    problem: Problem
    q: Tensor
    indptr: Tensor
    indices: Tensor
    spare_slots: Tensor
    tree_kv: Tensor
    dense: Tensor
    visible: Tensor
    out: Tensor


def slots_for(problem: Problem) -> int:
    """Slots of a layer's buffer: 189,096, or more where a problem needs more."""
    return max(SLOTS, problem.tokens + problem.batch)


def make_inputs(problem: Problem, device: torch.device, slots: int | None = None) -> Inputs:
    """Draw inputs; slots are random ones of a layer's buffer."""
    total = problem.batch * problem.nodes
    words = (problem.nodes + 63) // 64
    dense = random_tree(problem.nodes, problem.causal)
    bits = torch.zeros(problem.nodes, words * 64, dtype=torch.int64)
    bits[:, : problem.nodes] = dense
    packed = (bits.view(problem.nodes, words, 64) << torch.arange(64)).sum(-1)
    indptr = torch.tensor([0, *problem.prefixes]).cumsum(0)
    order = torch.randperm(slots or slots_for(problem), device=device)
    shape = (total, problem.heads)
    return Inputs(
        problem=problem,
        q=torch.randn(*shape, ROW_DIM, device=device).bfloat16(),
        indptr=indptr.to(torch.int32).to(device),
        indices=order[: problem.tokens].clone(),
        spare_slots=order[problem.tokens : problem.tokens + problem.batch].clone(),
        tree_kv=torch.randn(total, ROW_DIM, device=device).bfloat16(),
        dense=dense.to(device),
        visible=packed.repeat(problem.batch, 1).to(device),
        out=torch.empty(*shape, LATENT_DIM, dtype=torch.bfloat16, device=device),
    )


def random_tree(nodes: int, causal: bool = False) -> Tensor:
    """Bool [nodes, nodes]: node i sees its ancestors and itself, or all before it."""
    if causal:
        return torch.ones(nodes, nodes, dtype=torch.bool).tril()
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(0, node, ()))]
    return seen


class Pools:
    """The KV rows of all layers, one allocation for each element type, on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._bf16 = torch.empty(LAYERS * SLOTS, ROW_DIM, dtype=torch.bfloat16, device=device)
        self._e4m3 = torch.empty(LAYERS * SLOTS, ROW_DIM, dtype=torch.float8_e4m3fn, device=device)
        for rows, narrow in zip(self._bf16.split(SLOTS), self._e4m3.split(SLOTS), strict=True):
            narrow.copy_(rows.normal_())

    @property
    def bf16(self) -> Tensor:
        """All bfloat16 rows, [61 * slots, 576]."""
        return self._bf16

    def layers(self, problem: Problem) -> tuple[Tensor, ...]:
        """Disjoint buffers [slots, 576] that hold the problem's tokens and its spare slots.

        61 of them, or as many as the memory has where a problem needs more than 189,096 slots.
        """
        slots = slots_for(problem)
        pool = self._e4m3 if problem.e4m3 else self._bf16
        return tuple(
            pool[first : first + slots] for first in range(0, len(pool) - slots + 1, slots)
        )
