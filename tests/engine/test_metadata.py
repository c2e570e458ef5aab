import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from longleaf.engine.metadata import (  # noqa: E402
    GraphPlans,
    cut_extends,
    fill_visible,
    fixed_bits,
    full_mask_bits,
    pack_bits,
    plan_prefix,
    words,
)

WORKSPACE_BYTES = 11 << 20
"""What verify_workspace says of itself; the GPU tests hold the sum against the device's own."""


def unpack(bits: Any, nodes: int) -> Any:
    node = torch.arange(nodes)
    return (bits[..., node // 64] >> (node % 64)) & 1 == 1


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 130])
def test_packed_bits_are_the_matrix(nodes: int) -> None:
    allowed = torch.rand(3, nodes, nodes, generator=torch.Generator().manual_seed(nodes)) < 0.5
    bits = pack_bits(allowed)
    assert bits.shape == (3, nodes, words(nodes))
    assert bits.dtype == torch.int64
    assert torch.equal(unpack(bits, nodes), allowed)
    fixed = fixed_bits(nodes, "cpu")
    assert torch.equal(unpack(fixed.own, nodes), torch.eye(nodes, dtype=torch.bool))
    assert torch.equal(unpack(fixed.causal, nodes), torch.ones(nodes, nodes).tril() == 1)


def test_padding_requests_see_themselves_whatever_stood_there() -> None:
    nodes = 9
    fixed = fixed_bits(nodes, "cpu")
    target = torch.full((4 * nodes, 1), -1)
    tree = torch.arange(2 * nodes)[:, None]
    fill_visible(target, tree, 2, fixed)
    assert torch.equal(target[: 2 * nodes], tree)
    assert torch.equal(target[2 * nodes :], fixed.own.repeat(2, 1))
    fill_visible(target, None, 3, fixed)
    assert torch.equal(target[: 3 * nodes], fixed.causal.repeat(3, 1))
    assert torch.equal(target[3 * nodes :], fixed.own)


def test_the_full_mask_of_a_batch_gives_its_trees() -> None:
    nodes, prefixes = 5, [7, 0, 3]
    generator = torch.Generator().manual_seed(1)
    trees = torch.rand(len(prefixes), nodes, nodes, generator=generator) < 0.5
    parts = [
        torch.cat([torch.ones(nodes, length, dtype=torch.bool), tree], dim=1).flatten()
        for length, tree in zip(prefixes, trees, strict=True)
    ]
    # SGLang's buffer goes on after the batch.
    mask = torch.cat([*parts, torch.ones(50, dtype=torch.bool)])
    bits = full_mask_bits(mask, torch.tensor(prefixes), nodes)
    assert torch.equal(unpack(bits, nodes), trees.flatten(0, 1))


def request_table() -> Any:
    return torch.randint(
        0, 1 << 20, (6, 5000), dtype=torch.int32, generator=torch.Generator().manual_seed(2)
    )


def test_a_prefix_plan_leaves_out_the_step_and_the_padding() -> None:
    table = request_table()
    pointers = torch.full((5,), -7, dtype=torch.int32)
    slots = torch.full((10000,), -7, dtype=torch.int32)
    pool_indices = torch.tensor([4, 1, 2, 0])
    lengths = torch.tensor([1, 2500, 3, 777])
    plan_prefix(pointers, slots, table, pool_indices, lengths, rows=3, shorter=1)
    assert pointers.tolist() == [0, 0, 2499, 2501, 2501]
    assert torch.equal(slots[:2499], table[1, :2499])
    assert torch.equal(slots[2499:2501], table[2, :2])
    assert bool((slots[2501:] == -7).all())


INTERPRETED = """
import torch
from longleaf.engine import gather_kernel, metadata

table = torch.randint(0, 1 << 20, (6, 5000), dtype=torch.int32)
pool_indices = torch.tensor([3, 0, 5, 1])
lengths = torch.tensor([4100, 0, 1, 2048])
for rows in (0, 1, 3, 4):
    for shorter in (0, 1):
        pointers = torch.full((2, 5), -7, dtype=torch.int32)
        slots = torch.full((2, 9000), -7, dtype=torch.int32)
        gather_kernel.gather_prefix[4, 3](
            table, table.stride(0), pool_indices, lengths, pointers[0], slots[0], rows,
            SHORTER=shorter, MAX_BATCH=16, PARTS=3, BLOCK=512,
        )
        metadata.plan_prefix(
            pointers[1], slots[1], table, pool_indices, lengths, rows=rows, shorter=shorter
        )
        assert torch.equal(*pointers), (rows, shorter, pointers)
        assert torch.equal(*slots), (rows, shorter)
print("agreed")
"""


def test_the_gather_kernel_agrees_with_the_plain_plan() -> None:
    pytest.importorskip("triton")
    # Triton interprets only what was decorated under this variable, its own library included.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "agreed\n", done.stderr


def test_buffers_stay_below_the_limit_at_every_width_together() -> None:
    graphs = GraphPlans(context=262_144 + 64, device="cpu")
    for nodes in (32, 16, 8, 1):
        graphs.reserve(8, 8 * nodes)
    assert graphs.nbytes + WORKSPACE_BYTES <= 32 << 20
    assert graphs.nbytes < 9 << 20


def test_widths_share_buffers_and_differ_in_their_views() -> None:
    graphs = GraphPlans(context=100, device="cpu")
    graphs.reserve(4, 4 * 70)
    wide = graphs.captured(4, 70)
    narrow = graphs.captured(2, 8)
    alone = graphs.captured(4, 1)
    assert wide.visible is not None
    assert narrow.visible is not None
    assert wide.visible.shape == (280, 2)
    assert narrow.visible.shape == (16, 1)
    assert alone.visible is None
    assert wide.kv_indices is narrow.kv_indices
    assert narrow.kv_indptr.shape == (3,)
    assert graphs.replayed(4, 70) == [wide]
    with pytest.raises(RuntimeError, match="2 requests x 70 nodes"):
        graphs.replayed(2, 70)


def test_graphs_captured_before_the_buffers_grew_are_still_filled() -> None:
    graphs = GraphPlans(context=10, device="cpu")
    graphs.reserve(2, 16)
    first = graphs.captured(2, 8)
    graphs.reserve(4, 32)
    second = graphs.captured(2, 8)
    assert first.kv_indices.data_ptr() != second.kv_indices.data_ptr()
    assert [plan.kv_indices.data_ptr() for plan in graphs.replayed(2, 8)] == [
        first.kv_indices.data_ptr(),
        second.kv_indices.data_ptr(),
    ]
    # A third capture adds nothing.
    assert graphs.captured(2, 8) is second
    assert len(graphs.replayed(2, 8)) == 2


def test_long_extends_are_cut_and_each_piece_follows_the_one_before() -> None:
    pieces = cut_extends([10, 0, 5], [7, 0, 3], 3)
    assert pieces.request == [0, 0, 0, 1, 2]
    assert pieces.prefix == [10, 13, 16, 0, 5]
    assert pieces.rows == [3, 3, 1, 0, 3]
