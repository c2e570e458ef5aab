"""Marginals of a head in shards: those of the whole vocabulary, on every rank the same."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from types import SimpleNamespace  # noqa: E402

from longleaf.engine.draft_head import (  # noqa: E402
    MarginalHead,
    Shard,
    head_shard,
    merge_shards,
)
from tests.engine.emulated import EngineKernels, emulated_library, kernels  # noqa: E402, F401

BLOCK, HIDDEN, BATCH = 8, 16, 3


class Exchange:
    """An all-gather among ranks that run one after the other: first all write, then all read."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.parts: list[Any] = []
        self.reading = False

    def all_gather_into_tensor(self, out: Any, part: Any) -> None:
        if self.reading:
            out.copy_(torch.cat(self.parts))
        else:
            self.parts.append(part.clone())
            out.zero_()


def heads(weight: Any, sizes: list[int], k: int, group: Any) -> list[MarginalHead]:
    made, start = [], 0
    for size in sizes:
        # A rank's rows are padded, as SGLang pads them; the padding must never win.
        rows = torch.cat((weight[start : start + size], torch.full((5, HIDDEN), 100.0)))
        made.append(MarginalHead(Shard(rows, start, size), BLOCK, k, BATCH, group))
        start += size
    return made


def gathered(weight: Any, sizes: list[int], k: int, hidden: Any) -> list[Any]:
    """What each rank of a group computes."""
    exchange = Exchange(len(sizes))
    ranks = heads(weight, sizes, k, exchange)
    for rank in ranks:
        rank.eager(hidden)
    exchange.reading = True
    return [rank.eager(hidden) for rank in ranks]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [[64, 64], [40, 40, 40, 8], [61, 3, 64], [16] * 8])
@pytest.mark.parametrize("k", [1, 7, 63])
def test_shards_give_the_whole_vocabularys_marginals(sizes: list[int], k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(sum(sizes), HIDDEN, generator=generator)
    hidden = torch.randn(BATCH * BLOCK, HIDDEN, generator=generator)
    if ties:
        weight = weight.round()
        hidden = hidden.round().clamp(-1, 1)
    whole = MarginalHead(Shard(weight, 0, weight.shape[0]), BLOCK, k, BATCH).eager(hidden)
    ranks = gathered(weight, sizes, k, hidden)
    for rank in ranks:
        assert torch.equal(rank.tokens, whole.tokens)
        torch.testing.assert_close(rank.log_probs, whole.log_probs, atol=2e-6, rtol=0)
        assert torch.equal(rank.tokens, ranks[0].tokens)
        assert torch.equal(rank.log_probs, ranks[0].log_probs)
        assert (rank.log_probs.diff(dim=2) <= 0).all()
        assert (rank.log_probs <= 0).all()


@pytest.mark.usefixtures("kernels")
def test_impossible_tokens_stay_impossible() -> None:
    weight = torch.zeros(8, HIDDEN)
    weight[:, 0] = torch.tensor([float("-inf")] * 6 + [1.0, 1.0])
    hidden = torch.zeros(BLOCK, HIDDEN)
    hidden[:, 0] = 1.0
    (rank, _) = gathered(weight, [4, 4], 4, hidden)
    assert rank.tokens[0, 0, :2].tolist() == [6, 7]
    half = torch.log(torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(rank.log_probs[0, 0, :2], half.expand(2), atol=2e-6, rtol=0)
    assert rank.log_probs[0, 0, 2:].tolist() == [float("-inf")] * 2


def test_rows_without_a_finite_logit_end_a_tree() -> None:
    nothing = torch.full((2, 1, 1, 3), float("-inf"), dtype=torch.float64).view(torch.int64)
    row = torch.cat((nothing, torch.zeros(2, 1, 1, 3, dtype=torch.int64), nothing[..., :1]), 3)
    _, log_probs = merge_shards(row, 3)
    assert log_probs.view(-1).tolist() == [float("-inf")] * 3


@pytest.mark.usefixtures("kernels")
def test_the_tail_of_the_graph_fills_buffers_that_stay() -> None:
    weight = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(3))
    head = MarginalHead(Shard(weight, 0, 32), BLOCK, 15, 4)
    places = head.tokens.data_ptr(), head.log_probs.data_ptr()
    hidden = torch.randn(2 * BLOCK, HIDDEN)
    head(hidden, None)
    assert (head.tokens.data_ptr(), head.log_probs.data_ptr()) == places
    captured, eager = head.captured(2), head.eager(hidden)
    assert torch.equal(captured.tokens, eager.tokens)
    assert torch.equal(captured.log_probs, eager.log_probs)
    assert captured.tokens.is_contiguous()
    assert head.eager(torch.randn(9 * BLOCK, HIDDEN)).tokens.shape == (9, BLOCK - 1, 15)


@pytest.mark.usefixtures("kernels")
def test_ranks_that_gather_in_another_order_build_other_trees() -> None:
    """The trap: one rank's all-gather in another order, and equal logits on two shards."""
    exchange = Exchange(2)
    weight = torch.ones(16, HIDDEN)
    hidden = torch.ones(BLOCK, HIDDEN)
    ranks = heads(weight, [8, 8], 4, exchange)
    for rank in ranks:
        rank.eager(hidden)
    exchange.reading = True
    right = ranks[0].eager(hidden)
    exchange.parts.reverse()
    wrong = ranks[1].eager(hidden)
    assert right.tokens[0, 0].tolist() == [0, 1, 2, 3]
    assert not torch.equal(right.tokens, wrong.tokens)


def test_heads_that_cannot_be_used_are_refused() -> None:
    weight = torch.zeros(4, 2)
    indices = SimpleNamespace(num_added_elements=0, org_vocab_start_index=4, num_org_elements=3)
    assert head_shard(SimpleNamespace(weight=weight), 1) == (weight, 0, 4)
    shard = head_shard(SimpleNamespace(weight=weight, shard_indices=indices), 2)
    assert (shard.start, shard.size) == (4, 3)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        head_shard(None, 1)
    with pytest.raises(ValueError, match="unquantised"):
        head_shard(SimpleNamespace(weight=weight.to(torch.int8)), 1)
    with pytest.raises(ValueError, match="vocabulary-parallel"):
        head_shard(SimpleNamespace(weight=weight), 2)
    indices.num_added_elements = 1
    with pytest.raises(ValueError, match="added tokens"):
        head_shard(SimpleNamespace(weight=weight, shard_indices=indices), 2)
