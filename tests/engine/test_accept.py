"""What a step commits, log-probabilities of a path, uniforms, and grammars over trees."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from longleaf.engine.accept import (  # noqa: E402
    add_logprobs,
    committed,
    grammar_tree,
    sampling_tensors,
    seeded_uniforms,
    tree_links,
)
from longleaf.engine.verify_input import RootTrees  # noqa: E402
from longleaf_kernels import Accepted, DraftTrees  # noqa: E402


def trees_of(parents: list[list[int]], tokens: list[list[int]]) -> DraftTrees:
    made = RootTrees(len(parents), "cpu")(
        torch.zeros(len(parents), dtype=torch.int64), torch.zeros(len(parents), dtype=torch.int64)
    )
    return made._replace(
        tokens=torch.tensor(tokens), parents=torch.tensor(parents, dtype=torch.int32)
    )


PARENTS = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, -1, -1, -1]]
TOKENS = [[9, 1, 2, 3, 4, 5], [8, 7, 6, 8, 8, 8]]
ACCEPTED = Accepted(
    path=torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1]], dtype=torch.int32),
    path_len=torch.tensor([3, 1], dtype=torch.int32),
    bonus=torch.tensor([30, 31]),
)
SLOTS = torch.tensor([[5, 9, 2, 7, 0, 4], [1, 3, 8, 6, 11, 10]])


def test_a_path_commits_its_drafts_and_then_the_bonus() -> None:
    done = committed(trees_of(PARENTS, TOKENS), ACCEPTED, torch.tensor([100, 7]), SLOTS, 8)
    assert done.tokens.tolist() == [[2, 5, 30, 0, 0, 0, 0, 0], [31, 0, 0, 0, 0, 0, 0, 0]]
    assert done.lengths.tolist() == [3, 1]
    assert done.seq_lens.tolist() == [103, 8]
    assert done.rows.tolist() == [[0, 2, 5, 0], [6, 6, 6, 6]]
    assert done.positions.tolist() == [[100, 101, 102, 103], [7, 8, 9, 10]]
    assert done.slots.tolist() == [[5, 9, 2, 7], [1, 3, 8, 6]]
    assert done.slots.is_contiguous()


def test_a_full_path_fills_the_stride() -> None:
    full = ACCEPTED._replace(
        path=torch.tensor([[0, 1, 3], [0, 1, 2]], dtype=torch.int32),
        path_len=torch.tensor([3, 3], dtype=torch.int32),
    )
    done = committed(trees_of(PARENTS, TOKENS), full, torch.tensor([1, 1]), SLOTS, 3)
    assert done.tokens.tolist() == [[1, 3, 30], [7, 6, 31]]


def test_a_path_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a path of 4 does not fit 6 nodes, 3 columns"):
        committed(trees_of(PARENTS, TOKENS), ACCEPTED, torch.tensor([1, 1]), SLOTS, 3)


def test_a_step_of_roots_commits_the_bonus_alone() -> None:
    trees = RootTrees(1, "cpu")(torch.tensor([5, 6]), torch.tensor([10, 20]))
    accepted = Accepted(
        torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32), torch.tensor([1, 2])
    )
    done = committed(trees, accepted, torch.tensor([10, 20]), SLOTS[:, :1], 8)
    assert done.tokens[:, 0].tolist() == [1, 2]
    assert done.tokens[:, 1:].sum() == 0
    assert done.seq_lens.tolist() == [11, 21]


INTERPRETED = """
import torch
from longleaf.engine import accept, settle_kernel
from longleaf_kernels import Accepted, DraftTrees

draw = torch.Generator().manual_seed(1)

def integers(high, *shape, dtype=torch.int64):
    return torch.randint(0, high, shape, generator=draw).to(dtype)

for batch, nodes, max_path, stride in ((1, 9, 8, 8), (3, 16, 8, 8), (4, 1, 1, 8), (2, 64, 16, 16)):
    trees = DraftTrees(integers(1 << 40, batch, nodes), *[torch.zeros(0)] * 6)
    lengths = 1 + integers(max_path, batch, dtype=torch.int32)
    lengths[0] = max_path
    path = torch.stack([torch.randperm(nodes, generator=draw)[:max_path] for _ in range(batch)])
    path = path.sort(dim=1).values.int()
    path[torch.arange(max_path) >= lengths[:, None]] = -1
    accepted = Accepted(path, lengths, integers(1 << 40, batch))
    prefix, slots = integers(200_000, batch), integers(1 << 20, batch, nodes)
    expected = accept._committed_by_torch(trees, accepted, prefix, slots, stride)
    made = expected._replace(
        **{
            name: torch.full_like(getattr(expected, name), -7)
            for name in ("tokens", "seq_lens", "rows", "positions", "slots")
        }
    )
    settle_kernel.commit_paths[(batch,)](
        trees.tokens, path, lengths, accepted.bonus, prefix, slots,
        made.tokens, made.seq_lens, made.rows, made.positions, made.slots,
        nodes, max_path, stride, COLUMNS=settle_kernel.MAX_COLUMNS,
    )
    for name, one, two in zip(made._fields, made, expected, strict=True):
        assert torch.equal(one, two), (batch, nodes, name, one, two)
print("agreed")
"""


def test_the_kernel_commits_what_the_operators_commit() -> None:
    pytest.importorskip("triton")
    # Triton interprets only what was decorated under this variable, its own library included.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "agreed\n", done.stderr


def test_logprobs_are_those_of_the_rows_that_chose_the_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 40, generator=generator)
    done = committed(trees_of(PARENTS, TOKENS), ACCEPTED, torch.tensor([100, 7]), SLOTS, 8)
    output = SimpleNamespace(next_token_logits=logits.clone())
    batch = SimpleNamespace(
        seq_lens=torch.tensor([100, 7]),
        sampling_info=SimpleNamespace(is_all_greedy=True),
        top_logprobs_nums=[2, 0],
        token_ids_logprobs=[None, None],
    )
    add_logprobs(batch, output, done)
    expected = logits.log_softmax(-1)
    found = output.next_token_logprobs
    assert found.shape == (2, 4)
    rows = [(0, 0, 0, 2), (0, 1, 2, 5), (0, 2, 5, 30), (1, 0, 6, 31)]
    for request, column, row, token in rows:
        torch.testing.assert_close(found[request, column], expected[row, token])
    assert torch.equal(output.next_token_logits, logits)
    top = output.next_token_top_logprobs_val
    torch.testing.assert_close(torch.as_tensor(top[1]), expected[2].topk(2).values)


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds = torch.tensor([42, 42, 43, -5])
    first = seeded_uniforms(seeds, torch.tensor([10, 12, 10, 0]), 8)
    assert first.dtype == torch.float64
    assert ((first >= 0) & (first < 1)).all()
    assert torch.equal(first[0, 2:], first[1, :-2])
    assert not torch.equal(first[0], first[2])
    many = seeded_uniforms(torch.arange(2000), torch.arange(2000) * 7, 8).view(-1)
    assert abs(float(many.mean()) - 0.5) < 0.01
    assert abs(float(many.var()) - 1 / 12) < 0.005
    assert many.unique().numel() == many.numel()


def test_sglangs_sampling_parameters_arrive_in_the_kernels_types() -> None:
    info = SimpleNamespace(
        temperatures=torch.ones(2, 1),
        top_ps=torch.ones(2),
        top_ks=torch.tensor([1, 1 << 30], dtype=torch.int64),
        min_ps=torch.zeros(2, dtype=torch.float64),
    )
    taken = sampling_tensors(info)
    assert [t.dtype for t in taken] == [torch.float32, torch.float32, torch.int32, torch.float32]
    assert all(t.shape == (2,) for t in taken)


def test_links_lead_through_every_node_once() -> None:
    first_child, next_sibling = tree_links(torch.tensor(PARENTS, dtype=torch.int32))
    assert first_child.tolist() == [[1, 3, 5, -1, -1, -1], [1, 2, -1, -1, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1], [-1] * 6]


class Digits:
    """A grammar of ascending tokens, with the calls that SGLang makes."""

    def __init__(self) -> None:
        self.taken = [0]
        self.seen: list[tuple[int, int]] = []

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> Any:
        del device
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token: int) -> None:
        assert token > self.taken[-1]
        self.taken.append(token)

    def rollback(self, count: int) -> None:
        del self.taken[-count:]

    def fill_vocab_mask(self, mask: Any, row: int) -> None:
        self.seen.append((row, self.taken[-1]))
        mask[row] = sum(1 << token for token in range(self.taken[-1] + 1, 31))


def test_sglang_walks_the_tree_for_a_grammar() -> None:
    from sglang.srt.speculative.spec_utils import generate_token_bitmask

    tokens = [[9, 5, 3, 4, 7, 8], TOKENS[1]]
    tree = grammar_tree(trees_of(PARENTS, tokens))
    grammar = Digits()
    reqs = [SimpleNamespace(grammar=grammar), SimpleNamespace(grammar=None)]
    mask, _ = generate_token_bitmask(reqs, *tree.resolve(), 31)
    # Node 3 (token 4 after 5) is against the grammar: it is not entered.
    assert sorted(grammar.seen) == [(0, 0), (1, 5), (2, 3), (4, 7), (5, 8)]
    assert grammar.taken == [0]
    assert (mask[6:] == -1).all()
