"""Times the step's other kernels: build_tree, accept, compact_kv."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernel_bench.cases import BLOCK, BUDGET, COMPACTED_ROWS, LAYERS, SLOTS, VOCABULARY
from kernel_bench.timing import Sample, microseconds
from longleaf_kernels import (
    SamplingTensors,
    accept_greedy,
    accept_sampled,
    accept_workspace,
    build_tree,
    build_tree_workspace,
    compact_kv,
)

BUFFERS = 24
"""Sets of logits and of slots that launches rotate over: 24 x 4.6 MB is more than an L2 holds."""
DEVICE = torch.device("cuda")


def step_kernels(pool: Tensor) -> dict[str, Callable[[], Sample]]:
    """Measurements by row name; pool is [61 * slots, 576], one layer after the other."""
    return {
        "build_tree_us": lambda: time_build_tree(1, torch.float32),
        "build_tree_bf16_us": lambda: time_build_tree(1, torch.bfloat16),
        "build_tree_b32_us": lambda: time_build_tree(32, torch.float32),
        "accept_greedy_us": time_accept_greedy,
        "accept_sampled_us": lambda: time_accept_sampled(14.0),
        "accept_sampled_flat_us": lambda: time_accept_sampled(0.0),
        "accept_sampled_n9_us": lambda: time_accept_sampled(14.0, nodes=9),
        "accept_sampled_n9_flat_us": lambda: time_accept_sampled(0.0, nodes=9),
        "accept_sampled_b32_us": lambda: time_accept_sampled(14.0, batch=32),
        "compact_kv_us": lambda: time_compact(pool, 1),
        "compact_kv_b32_us": lambda: time_compact(pool, 32),
    }


def time_build_tree(batch: int, dtype: torch.dtype) -> Sample:
    """From logits [batch, 7, 163,840], of a peaked distribution as a drafter's."""
    depth = BLOCK - 1
    logits = [
        4.0 * torch.randn(batch, depth, VOCABULARY, device=DEVICE)
        for _ in range(max(2, BUFFERS // batch))
    ]
    buffers = [tensor.to(dtype) for tensor in logits]
    roots = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    workspace = build_tree_workspace(batch, depth, VOCABULARY, BUDGET, DEVICE)

    def launch(buffer: Tensor) -> None:
        build_tree(buffer, roots, BUDGET, workspace=workspace)

    return microseconds(launch, buffers, replays=40)


def time_accept_greedy() -> Sample:
    """One chain of 8 nodes in a tree of 65, all accepted: the longest walk."""
    tokens, parents, _ = _tree(BUDGET + 1)
    targets = [tokens + 1 for _ in range(BUFFERS)]

    def launch(target: Tensor) -> None:
        accept_greedy(tokens, parents, target, BLOCK)

    return microseconds(launch, targets, replays=40)


def time_accept_sampled(lead: float, nodes: int = BUDGET + 1, batch: int = 1) -> Sample:
    """Logits [batch, nodes, 163,840] float32, temperature 0.7, top-p 0.95.

    lead: how far one logit of a row stands above normal ones of deviation 2.5. With 14 the 95 %
    are one token in some rows and thousands in others, without it thousands in all.
    """
    tokens, parents, depths = (tensor.repeat(batch, 1) for tensor in _tree(nodes))
    sampling = SamplingTensors(
        torch.full((batch,), 0.7, device=DEVICE),
        torch.full((batch,), 0.95, device=DEVICE),
        torch.zeros(batch, dtype=torch.int32, device=DEVICE),
        torch.zeros(batch, device=DEVICE),
    )
    uniforms = torch.rand(batch, BLOCK, dtype=torch.float64, device=DEVICE)
    workspace = accept_workspace(batch, nodes, DEVICE)
    count = 4 if batch * nodes > 32 else BUFFERS  # more than an L2 holds
    buffers = [2.5 * torch.randn(batch, nodes, VOCABULARY, device=DEVICE) for _ in range(count)]
    for logits in buffers:
        logits[:, torch.arange(nodes), torch.arange(nodes) + 1] += lead

    def launch(logits: Tensor) -> None:
        accept_sampled(tokens, parents, depths, logits, sampling, uniforms, workspace)

    return microseconds(launch, buffers, replays=40)


def time_compact(pool: Tensor, batch: int) -> Sample:
    """Seven rows of every layer move; slots differ from launch to launch."""
    pools: Sequence[Tensor] = [pool[layer * SLOTS : (layer + 1) * SLOTS] for layer in range(LAYERS)]
    nodes = BUDGET + 1
    path = torch.arange(0, 2 * COMPACTED_ROWS + 1, 2, dtype=torch.int32, device=DEVICE)
    paths = path.repeat(batch, 1)
    lengths = torch.full((batch,), COMPACTED_ROWS + 1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(SLOTS, device=DEVICE)[: BUFFERS * batch * nodes]
    slots = list(order.view(BUFFERS, batch, nodes))

    def launch(chosen: Tensor) -> None:
        compact_kv(pools, chosen, paths, lengths)

    return microseconds(launch, slots, replays=40)


def _tree(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and depths of a chain of 8 nodes followed by children of the root."""
    chain = list(range(BLOCK))
    rest = nodes - BLOCK
    parents = torch.tensor([[-1, *chain[:-1], *[0] * rest]], dtype=torch.int32)
    depths = torch.tensor([[*chain, *[1] * rest]], dtype=torch.int32)
    tokens = torch.arange(nodes)[None]
    return tokens.to(DEVICE), parents.to(DEVICE), depths.to(DEVICE)
