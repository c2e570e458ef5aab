"""compact_kv, its device code compiled for the CPU, against ddtree's compaction plan."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch

from tests.kernels.compact_cases import (
    check_compact_kv,
    random_paths,
    random_pools,
)
from tests.kernels.operators import EmulatedOperators

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def operators(emulated_library: Path) -> EmulatedOperators:
    return EmulatedOperators(emulated_library)


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("nodes", "max_path"), [(9, 8), (65, 8), (128, 128), (2, 2)])
def test_rows_of_all_layers_move_as_planned(
    operators: EmulatedOperators,
    nodes: int,
    max_path: int,
    dtype: torch.dtype,
    slot_dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(nodes)
    batch = 4
    pools = random_pools(layers=3, slots=600, width=576, dtype=dtype)
    slots = torch.from_numpy(rng.permutation(600)[: batch * nodes]).view(batch, nodes)
    path, path_len = random_paths(rng, batch, nodes, max_path)
    moved = check_compact_kv(operators, pools, slots.to(slot_dtype), path, path_len)
    assert moved > 0 or nodes == 2


def test_a_path_that_shifts_by_one_reads_rows_before_they_are_overwritten(
    operators: EmulatedOperators,
) -> None:
    """Every destination is the source of the move before it."""
    pools = random_pools(layers=2, slots=64, width=576, dtype=torch.bfloat16)
    path = torch.tensor([[0, *range(2, 32)]], dtype=torch.int32)
    slots = torch.arange(32).flip(0)[None]
    path_len = torch.tensor([31], dtype=torch.int32)
    assert check_compact_kv(operators, pools, slots, path, path_len) == 30


def test_the_spine_moves_nothing(operators: EmulatedOperators) -> None:
    pools = random_pools(layers=2, slots=32, width=576, dtype=torch.bfloat16)
    path = torch.arange(8, dtype=torch.int32)[None].repeat(3, 1)
    path_len = torch.tensor([1, 5, 8], dtype=torch.int32)
    slots = torch.arange(27).view(3, 9)
    assert check_compact_kv(operators, pools, slots, path, path_len) == 0


def test_pages_and_padded_rows(operators: EmulatedOperators) -> None:
    """[pages, 64, width] is the same pool; rows may lie apart by more than their width."""
    rng = np.random.default_rng(0)
    path, path_len = random_paths(rng, 1, 20, 8)
    slots = torch.from_numpy(rng.permutation(256)[:20])[None]
    flat = random_pools(layers=2, slots=256, width=576, dtype=torch.bfloat16)
    check_compact_kv(operators, [pool.view(4, 64, 576) for pool in flat], slots, path, path_len)

    wide = random_pools(layers=2, slots=256, width=640, dtype=torch.bfloat16)
    before = [pool.clone() for pool in wide]
    operators.compact_kv([pool[:, :576] for pool in wide], slots, path, path_len)
    for pool, old in zip(wide, before, strict=True):
        assert torch.equal(pool[:, 576:].view(torch.int16), old[:, 576:].view(torch.int16))
        moved = slots[0][path[0, 1 : int(path_len[0])].long()]
        kept = slots[0, 1 : int(path_len[0])]
        assert torch.equal(pool[kept, :576].view(torch.int16), old[moved, :576].view(torch.int16))
