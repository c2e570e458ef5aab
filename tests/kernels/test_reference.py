"""The torch reference of verify_mla against loops over single tokens."""

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch

from longleaf_kernels import reference
from longleaf_kernels.reference import verify_mla_reference

pytestmark = pytest.mark.torch
SCALE = 0.07


def naive(
    q: torch.Tensor,
    rows: list[list[float]],
    tree_rows: list[list[float]],
    seen: list[list[bool]],
) -> tuple[list[list[list[float]]], list[list[float]]]:
    """One request, token by token: rows of the prefix, then the tree's that each node sees."""
    outs, sums = [], []
    for node, heads in enumerate(q.tolist()):
        keys = rows + [row for row, sees in zip(tree_rows, seen[node], strict=True) if sees]
        out_heads, sum_heads = [], []
        for query in heads:
            scores = [
                SCALE * math.fsum(a * b for a, b in zip(query, key, strict=True)) for key in keys
            ]
            total = math.fsum(math.exp(score) for score in scores)
            out_heads.append(
                [
                    math.fsum(math.exp(s) * key[i] for s, key in zip(scores, keys, strict=True))
                    / total
                    if keys
                    else 0.0
                    for i in range(512)
                ]
            )
            sum_heads.append(math.log(total) if keys else -math.inf)
        outs.append(out_heads)
        sums.append(sum_heads)
    return outs, sums


def bits(seen: list[list[bool]]) -> torch.Tensor:
    words = range(0, len(seen[0]), 64)
    packed = [
        [sum(sees << j for j, sees in enumerate(row[first : first + 64])) for first in words]
        for row in seen
    ]
    return torch.from_numpy(np.array(packed, dtype=np.uint64).view(np.int64))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pool_of(slots: int, used: torch.Tensor) -> torch.Tensor:
    """Rows of 576; every slot that is not used holds NaN."""
    pool = torch.full((slots, 576), torch.nan)
    pool[used] = random(len(used), 576, seed=slots)
    return pool


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


FORK = [[True, False, False], [True, True, False], [True, False, True]]
CHAIN = [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 24])
def test_scattered_prefixes_of_mixed_lengths(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORES_HELD", chunk)
    used = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:13]
    pool = pool_of(40, used)
    q, tree = random(9, 2, 576, seed=1), random(9, 576, seed=2)
    indptr, indices = int32(0, 5, 5, 13), used.to(torch.int64)  # the second prefix is empty
    visible = torch.cat([bits(FORK), bits(CHAIN), bits(FORK)])
    out, lse = verify_mla_reference(q, pool, indptr, indices, tree, visible, scale=SCALE)
    assert out.dtype == lse.dtype == torch.float64
    for request, seen in enumerate((FORK, CHAIN, FORK)):
        rows = slice(3 * request, 3 * request + 3)
        prefix = pool[indices[indptr[request] : indptr[request + 1]]].tolist()
        outs, sums = naive(q[rows], prefix, tree[rows].tolist(), seen)
        torch.testing.assert_close(out[rows], torch.tensor(outs, dtype=torch.float64))
        torch.testing.assert_close(lse[rows], torch.tensor(sums, dtype=torch.float64))


def test_causal_is_the_mask_of_a_chain_and_may_be_ragged() -> None:
    used = torch.arange(6)
    pool, q, tree = pool_of(8, used), random(4, 1, 576, seed=3), random(4, 576, seed=4)
    arguments = q, pool, int32(0, 2, 6), used, tree
    out, lse = verify_mla_reference(*arguments, None, scale=SCALE, q_indptr=int32(0, 3, 4))
    for rows, prefix, n in ((slice(0, 3), [0, 1], 3), (slice(3, 4), [2, 3, 4, 5], 1)):
        chain = [[j <= i for j in range(n)] for i in range(n)]
        outs, sums = naive(q[rows], pool[prefix].tolist(), tree[rows].tolist(), chain)
        torch.testing.assert_close(out[rows], torch.tensor(outs, dtype=torch.float64))
        torch.testing.assert_close(lse[rows], torch.tensor(sums, dtype=torch.float64))
    first = [tensor[:3] for tensor in (out, lse)]
    masked = verify_mla_reference(
        q[:3], pool, int32(0, 2), used[:2], tree[:3], bits(CHAIN), scale=SCALE
    )
    for got, wanted in zip(masked, first, strict=True):
        assert torch.equal(got, wanted)


def test_pages_hold_the_same_tokens() -> None:
    """70 tokens of one request in pages 4 and 1, 3 of another in page 2."""
    order = torch.tensor([4, 1, 2], dtype=torch.int32)
    slots = torch.cat([torch.arange(256, 320), torch.arange(64, 70), torch.arange(128, 131)])
    pool = pool_of(320, slots)
    q, tree = random(6, 2, 576, seed=5), random(6, 576, seed=6)
    visible = torch.cat([bits(FORK), bits(FORK)])
    rest = {"tree_kv": tree, "visible": visible, "scale": SCALE}
    by_slot = verify_mla_reference(q, pool, int32(0, 70, 73), slots, **rest)
    by_page = verify_mla_reference(
        q, pool.view(5, 64, 576), int32(0, 70, 73), order, page_indptr=int32(0, 2, 3), **rest
    )
    for got, wanted in zip(by_page, by_slot, strict=True):
        assert torch.equal(got, wanted)
        assert got.isfinite().all()


def test_e4m3_rows_are_scaled_and_the_trees_are_not() -> None:
    used = torch.arange(5)
    stored = pool_of(5, used).to(torch.float8_e4m3fn)
    q, tree = random(3, 1, 576, seed=7).bfloat16(), random(3, 576, seed=8).bfloat16()
    out, lse = verify_mla_reference(
        q, stored, int32(0, 5), used, tree, bits(FORK), scale=SCALE, kv_scale=0.25
    )
    prefix = (stored.float() * 0.25).tolist()
    outs, sums = naive(q.float(), prefix, tree.float().tolist(), FORK)
    torch.testing.assert_close(out, torch.tensor(outs, dtype=torch.float64))
    torch.testing.assert_close(lse, torch.tensor(sums, dtype=torch.float64))


def test_a_node_that_sees_nothing_gives_zero_and_minus_infinity() -> None:
    q, tree, pool = random(2, 1, 576, seed=9), random(2, 576, seed=10), torch.zeros(1, 576)
    visible = torch.tensor([[0], [0b11]])
    none = torch.empty(0, dtype=torch.int64)
    out, lse = verify_mla_reference(q, pool, int32(0, 0), none, tree, visible, scale=SCALE)
    assert (out[0] == 0).all()
    assert lse[0].item() == -math.inf
    assert lse[1].isfinite().all()


def test_every_bit_of_both_words_counts() -> None:
    """Node 64 sees the root and itself, through bit 0 of word 1; node 63's bit is the sign."""
    n = 66
    seen = [[j in (0, i) or (i == 65 and j == 63) for j in range(n)] for i in range(n)]
    q, tree, pool = random(n, 1, 576, seed=11), random(n, 576, seed=12), torch.zeros(1, 576)
    none = torch.empty(0, dtype=torch.int64)
    out, _ = verify_mla_reference(q, pool, int32(0, 0), none, tree, bits(seen), scale=SCALE)
    for node in (0, 63, 64, 65):
        outs, _ = naive(q[node : node + 1], [], tree.tolist(), seen[node : node + 1])
        torch.testing.assert_close(out[node : node + 1], torch.tensor(outs, dtype=torch.float64))


def test_a_long_prefix_in_float32_is_close_to_float64() -> None:
    """200k tokens under 128 rows, whose scores alone would be 205 MB in float64."""
    n = 200_000
    pool = torch.randn(n, 576, generator=torch.Generator().manual_seed(13)).bfloat16()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(14))
    q, tree = random(16, 8, 576, seed=15), random(16, 576, seed=16)
    arguments = q, pool, int32(0, n), order, tree, None
    exact = verify_mla_reference(*arguments, scale=SCALE)
    single = verify_mla_reference(*arguments, scale=SCALE, dtype=torch.float32)
    for got, wanted in zip(single, exact, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 1e-5
