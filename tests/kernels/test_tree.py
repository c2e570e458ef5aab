"""build_tree and expand_tree, their device code compiled for the CPU, against ddtree."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch

from longleaf.ddtree import build_tree, top_k_marginals
from tests.kernels.operators import EmulatedOperators
from tests.kernels.tree_cases import check_build_tree, check_expand_tree, tree_of

pytestmark = pytest.mark.torch
BUDGETS = [0, 1, 2, 6, 7, 8, 31, 32, 33, 63, 64, 65, 127]


@pytest.fixture(scope="module")
def operators(emulated_library: Path) -> EmulatedOperators:
    return EmulatedOperators(emulated_library)


@pytest.mark.parametrize("seed_chain", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_expand_tree_is_ddtree_for_every_budget(
    operators: EmulatedOperators, budget: int, seed_chain: bool
) -> None:
    rng = np.random.default_rng(budget)
    for depth, width, scale in ((7, 130, 2.0), (15, 64, 0.3), (1, 9, 1.0), (3, 1, 1.0)):
        logits = scale * rng.normal(size=(3, depth, 4 * width))
        pairs = [top_k_marginals(rows, width) for rows in logits]
        tokens = np.stack([pair[0] for pair in pairs])
        log_probs = np.stack([pair[1] for pair in pairs])
        check_expand_tree(operators, tokens, log_probs, budget, seed_chain)


@pytest.mark.parametrize("seed_chain", [True, False])
def test_expand_tree_settles_ties_as_ddtree_does(
    operators: EmulatedOperators, seed_chain: bool
) -> None:
    """Scores from a grid of eighths: equal in every combination of depth, parent and rank."""
    rng = np.random.default_rng(5)
    for budget, levels in product((8, 40, 64, 127), (2, 3, 6)):
        steps = np.sort(rng.integers(0, levels, size=(16, 6, 12)) / 8.0, axis=-1)
        tokens = np.argsort(rng.random(steps.shape), axis=-1)
        check_expand_tree(operators, tokens, -steps, budget, seed_chain)


@pytest.mark.parametrize("seed_chain", [True, False])
def test_expand_tree_never_takes_an_impossible_token(
    operators: EmulatedOperators, seed_chain: bool
) -> None:
    log_probs = np.full((2, 4, 5), -np.inf)
    log_probs[0, :, :2] = np.log(0.5)
    log_probs[1, 0, :3] = np.log([0.5, 0.3, 0.2])
    log_probs[1, 1, 0] = 0.0  # certain; then depth 3 has nothing possible
    tokens = np.broadcast_to(np.arange(5), log_probs.shape).copy()
    check_expand_tree(operators, tokens, log_probs, 64, seed_chain)


def test_expand_tree_tells_scores_apart_by_their_last_bit(operators: EmulatedOperators) -> None:
    """The child of node 1 scores -2.0, its sibling, which a tie would prefer, a last bit less."""
    log_probs = np.array([[[-1.0, np.nextafter(-2.0, -3.0)], [-1.0, -9.0]]])
    tokens = np.arange(4).reshape(1, 2, 2)
    assert build_tree(0, tokens[0], log_probs[0], 2, False).parents.tolist() == [-1, 0, 1]
    check_expand_tree(operators, tokens, log_probs, 2, seed_chain=False)


@pytest.mark.parametrize("seed_chain", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 8, 64, 65, 127])
@pytest.mark.parametrize("vocabulary", [40, 1001, 8192, 20_003])
def test_build_tree_from_logits(
    operators: EmulatedOperators, vocabulary: int, budget: int, seed_chain: bool
) -> None:
    generator = torch.Generator().manual_seed(vocabulary + budget)
    logits = 3.0 * torch.randn(2, 7, vocabulary, generator=generator)
    check_build_tree(operators, logits, budget, seed_chain)


@pytest.mark.parametrize("vocabulary", [8200, 8193])
def test_build_tree_from_bfloat16_logits_full_of_ties(
    operators: EmulatedOperators, vocabulary: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, vocabulary, generator=generator).bfloat16()
    check_build_tree(operators, logits, 64, seed_chain=True)


def test_build_tree_at_the_deployed_size(operators: EmulatedOperators) -> None:
    logits = 4.0 * torch.randn(1, 7, 163_840, generator=torch.Generator().manual_seed(2))
    check_build_tree(operators, logits, 64, seed_chain=True)


@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(17_000),
        torch.arange(17_000.0),
        -torch.arange(17_000.0),
        torch.arange(17_000) % 512 * 1.0,
        (torch.arange(17_000) % 2048 == 5) * 50.0 + torch.arange(17_000) % 7,
        torch.arange(17_000) // 8192 * 100.0 + torch.arange(17_000) % 3,
        torch.where(torch.arange(17_000) % 2 == 0, 0.0, -0.0),
    ],
    ids=["equal", "ascending", "descending", "periodic", "one-thread", "last-tile", "signed-zero"],
)
def test_build_tree_from_rows_that_defeat_the_threshold(
    operators: EmulatedOperators, row: torch.Tensor
) -> None:
    logits = row.expand(1, 3, -1).contiguous()
    for budget in (64, 127):
        check_build_tree(operators, logits, budget, seed_chain=False)


def test_build_tree_reads_strided_rows(operators: EmulatedOperators) -> None:
    """Rows 1.. of a drafted block, cut from a wider buffer."""
    block = torch.randn(2, 8, 4096, generator=torch.Generator().manual_seed(4))
    check_build_tree(operators, block[:, 1:, :3000], 16, seed_chain=True)
    check_build_tree(operators, block[:, 1:, 1:3002], 16, seed_chain=True)


def test_a_row_without_a_finite_maximum_ends_the_tree_above_it(
    operators: EmulatedOperators,
) -> None:
    logits = torch.randn(3, 4, 300, generator=torch.Generator().manual_seed(6))
    logits[0, 2] = -torch.inf
    logits[1, 2, 7] = torch.inf
    logits[2, 2, 7] = torch.nan  # ranks as -inf: the rest of the row stands
    zeros = torch.zeros(3, dtype=torch.int64)
    trees, marginals = operators.build_tree(logits, zeros, zeros, 32, True)
    for request, depth in ((0, 2), (1, 2), (2, 4)):
        assert tree_of(trees, request).depths.max() == depth
    assert (marginals.log_probs[:2, 2] == -torch.inf).all()
    sane = torch.where(logits[2].isnan(), -torch.inf, logits[2]).numpy()
    expected = build_tree(0, top_k_marginals(sane, 32)[0], marginals.log_probs[2].numpy(), 32)
    assert tree_of(trees, 2).tokens.tolist() == expected.tokens.tolist()


def test_a_request_gets_the_same_bits_in_every_batch(operators: EmulatedOperators) -> None:
    logits = torch.randn(5, 7, 9000, generator=torch.Generator().manual_seed(7))
    roots = torch.arange(5)
    together, _ = operators.build_tree(logits, roots, roots, 64, True)
    for i in range(5):
        one = slice(i, i + 1)
        alone, _ = operators.build_tree(logits[one], roots[one], roots[one], 64, True)
        for name, mine, theirs in zip(alone._fields, alone, together, strict=True):
            assert torch.equal(mine, theirs[one]), name
