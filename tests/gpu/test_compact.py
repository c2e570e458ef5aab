"""compact_kv on a GPU against ddtree's compaction plan."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from longleaf_kernels import compact_kv
from tests.kernels.compact_cases import (
    check_compact_kv,
    random_paths,
    random_pools,
)
from tests.kernels.operators import GpuOperators


@pytest.fixture(scope="module")
def operators() -> GpuOperators:
    return GpuOperators()


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("batch", "nodes", "max_path"), [(1, 9, 8), (8, 65, 8), (4, 128, 128)])
def test_rows_of_all_layers_move_as_planned(
    operators: GpuOperators,
    batch: int,
    nodes: int,
    max_path: int,
    dtype: torch.dtype,
    slot_dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(nodes)
    pools = random_pools(layers=61, slots=1024, width=576, dtype=dtype)
    for _ in range(3):
        slots = torch.from_numpy(rng.permutation(1024)[: batch * nodes]).view(batch, nodes)
        path, path_len = random_paths(rng, batch, nodes, max_path)
        check_compact_kv(operators, pools, slots.to(slot_dtype), path, path_len)


def test_a_path_that_shifts_by_one_reads_rows_before_they_are_overwritten(
    operators: GpuOperators,
) -> None:
    pools = random_pools(layers=61, slots=128, width=576, dtype=torch.bfloat16)
    path = torch.tensor([[0, *range(2, 128)]], dtype=torch.int32)
    path_len = torch.tensor([127], dtype=torch.int32)
    slots = torch.randperm(128)[None]
    assert check_compact_kv(operators, pools, slots, path, path_len) == 126


def test_the_spine_moves_nothing(operators: GpuOperators) -> None:
    pools = random_pools(layers=61, slots=64, width=576, dtype=torch.bfloat16)
    path = torch.arange(8, dtype=torch.int32)[None].repeat(3, 1)
    path_len = torch.tensor([1, 5, 8], dtype=torch.int32)
    assert check_compact_kv(operators, pools, torch.arange(27).view(3, 9), path, path_len) == 0


def test_a_graph_replays_on_new_paths() -> None:
    rng = np.random.default_rng(1)
    pools = [pool.cuda() for pool in random_pools(61, 512, 576, torch.bfloat16)]
    slots = torch.from_numpy(rng.permutation(512)[:130]).view(2, 65).cuda()
    path = torch.zeros(2, 8, dtype=torch.int32, device="cuda")
    path_len = torch.ones(2, dtype=torch.int32, device="cuda")
    compact_kv(pools, slots, path, path_len)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compact_kv(pools, slots, path, path_len)
    for _ in range(10):
        new_path, new_len = random_paths(rng, 2, 65, 8)
        path.copy_(new_path)
        path_len.copy_(new_len)
        expected = [pool.clone() for pool in pools]
        for request, length in enumerate(new_len.tolist()):
            source = slots[request][new_path[request, :length].long().cuda()]
            for pool in expected:
                pool[slots[request, :length]] = pool[source]
        graph.replay()
        for pool, wanted in zip(pools, expected, strict=True):
            assert torch.equal(pool.view(torch.int16), wanted.view(torch.int16))
