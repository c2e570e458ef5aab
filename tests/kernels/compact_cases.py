"""What compact_kv must do, on whatever runs it, against longleaf.ddtree.compaction_plan."""

import numpy as np
import torch

from longleaf.ddtree import compaction_plan
from tests.kernels.operators import Operators


def random_paths(
    rng: np.random.Generator, batch: int, nodes: int, max_path: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted paths as accept gives them: root, then ascending nodes, -1 after the end."""
    path = torch.full((batch, max_path), -1, dtype=torch.int32)
    lengths = torch.from_numpy(rng.integers(1, min(max_path, nodes) + 1, size=batch)).int()
    for row, length in zip(path, lengths.tolist(), strict=True):
        chosen = np.sort(rng.permutation(np.arange(1, nodes))[: length - 1])
        row[:length] = torch.from_numpy(np.concatenate([[0], chosen]).astype(np.int32))
    return path, lengths


def check_compact_kv(
    operators: Operators,
    pools: list[torch.Tensor],
    slots: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
) -> int:
    """Every pool ends as the plan says, every other slot untouched; returns how many rows moved."""
    moved = 0
    expected = [pool.clone() for pool in pools]
    for request, length in enumerate(path_len.tolist()):
        plan = compaction_plan(path[request, :length].numpy())
        moved += len(plan)
        for pool in expected:
            rows = pool.view(-1, pool.shape[-1])
            used = slots[request].long()
            rows[used[plan.dst]] = rows[used[plan.src]]
    operators.compact_kv(pools, slots, path, path_len)
    for i, (pool, wanted) in enumerate(zip(pools, expected, strict=True)):
        assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8)), f"pool {i}"
    return moved


def random_pools(layers: int, slots: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Pools of random bytes, NaNs among them."""
    generator = torch.Generator().manual_seed(layers)
    size = torch.empty(0, dtype=dtype).element_size()
    return [
        torch.randint(256, (slots, width * size), dtype=torch.uint8, generator=generator).view(
            dtype
        )
        for _ in range(layers)
    ]
