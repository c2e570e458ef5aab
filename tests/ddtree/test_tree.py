"""The tree against brute force, against a second implementation, and against bad input."""

from itertools import combinations, product
from math import exp, inf, log

import numpy as np
import numpy.typing as npt
import pytest

from longleaf.ddtree import Tree, build_tree, top_k_marginals
from tests.ddtree.toy import path_tokens, prefixes, random_marginals

Marginals = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


def all_prefixes(marginals: Marginals) -> dict[tuple[int, ...], float]:
    """Every prefix of every depth with its probability."""
    tokens, log_probs = marginals
    rows = [
        dict(zip(t, map(exp, p), strict=True))
        for t, p in zip(*map(list, (tokens, log_probs)), strict=True)
    ]
    table: dict[tuple[int, ...], float] = {}
    for depth in range(1, len(rows) + 1):
        for prefix in product(*(row for row in rows[:depth])):
            value = 1.0
            for row, token in zip(rows, prefix, strict=False):
                value *= row[token]
            table[tuple(int(t) for t in prefix)] = value
    return table


def best_closed_mass(
    table: dict[tuple[int, ...], float], size: int, forced: set[tuple[int, ...]]
) -> float:
    """Greatest total probability of an ancestor-closed set of `size` prefixes, by trying all."""
    free = [p for p in table if p not in forced]
    best = -inf
    for chosen in combinations(free, size - len(forced)):
        members = forced | set(chosen)
        if all(len(p) == 1 or p[:-1] in members for p in members):
            best = max(best, sum(table[p] for p in members))
    return best


def chain(marginals: Marginals, length: int) -> set[tuple[int, ...]]:
    spine = tuple(int(t) for t in marginals[0][:, 0])
    return {spine[:d] for d in range(1, length + 1)}


@pytest.mark.parametrize("seed_chain", [False, True])
@pytest.mark.parametrize(("depth", "width", "budget"), [(3, 2, 5), (2, 3, 4), (2, 4, 6), (4, 1, 3)])
def test_tree_is_optimal_against_brute_force(
    depth: int, width: int, budget: int, seed_chain: bool
) -> None:
    for seed in range(12):
        marginals = random_marginals(np.random.default_rng(seed), depth, width)
        table = all_prefixes(marginals)
        size = min(budget, len(table))
        tree = build_tree(0, *marginals, budget, seed_chain)
        found = prefixes(tree)
        assert len(found) == size == len(tree) - 1
        forced = chain(marginals, min(depth, budget)) if seed_chain else set()
        assert forced <= found
        mass = sum(table[p] for p in found)
        assert mass == pytest.approx(best_closed_mass(table, size, forced), abs=1e-12)


def test_mass_is_the_expected_accepted_depth() -> None:
    """When the marginals are the target's, the tree's total probability is what a walk accepts."""
    marginals = random_marginals(np.random.default_rng(5), 3, 3)
    tree = build_tree(0, *marginals, 9, seed_chain=False)
    members = prefixes(tree)
    table = all_prefixes(marginals)
    expected = 0.0
    for word in (p for p in table if len(p) == 3):
        accepted = max((d for d in (1, 2, 3) if word[:d] in members), default=0)
        expected += table[word] * accepted
    assert expected == pytest.approx(float(np.exp(tree.log_probs[1:]).sum()), abs=1e-12)


def scan_order(marginals: Marginals, budget: int, seed_chain: bool) -> list[tuple[int, int, float]]:
    """The documented order by a plain scan of all candidates: (parent, rank, score) by node."""
    rows = [list(map(float, row)) for row in marginals[1]]
    nodes: list[tuple[int, int, float]] = [(-1, 0, 0.0)]
    depths = [0]

    def take(parent: int, rank: int) -> None:
        nodes.append((parent, rank, nodes[parent][2] + rows[depths[parent]][rank]))
        depths.append(depths[parent] + 1)

    if seed_chain:
        for d in range(min(len(rows), budget)):
            take(d, 0)
    while len(nodes) <= budget:
        taken = {(parent, rank) for parent, rank, _ in nodes}
        candidates = [
            (-(nodes[parent][2] + rows[depths[parent]][rank]), depths[parent] + 1, parent, rank)
            for parent in range(len(nodes))
            if depths[parent] < len(rows)
            for rank in range(len(rows[0]))
            if (parent, rank) not in taken
        ]
        if not candidates:
            break
        _, _, parent, rank = min(candidates)
        take(parent, rank)
    return nodes


@pytest.mark.parametrize("seed_chain", [False, True])
def test_order_of_nodes_is_the_documented_one_with_many_ties(seed_chain: bool) -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        depth, width = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        # Few distinct, exactly representable values, 0 among them: sums tie exactly.
        log_probs = -np.sort(rng.integers(0, 4, size=(depth, width)) / 4.0, axis=1)
        tokens = np.stack([rng.permutation(50)[:width] for _ in range(depth)])
        budget = int(rng.integers(0, 30))
        tree = build_tree(0, tokens, log_probs, budget, seed_chain)
        expected = scan_order((tokens, log_probs), budget, seed_chain)
        assert tree.parents.tolist() == [parent for parent, _, _ in expected]
        assert tree.log_probs.tolist() == [score for _, _, score in expected]
        assert tree.tokens.tolist()[1:] == [
            int(tokens[tree.depths[node] - 1, rank])
            for node, (_, rank, _) in enumerate(expected)
            if node > 0
        ]


def test_ties_prefer_shallow_then_early_parent_then_low_rank() -> None:
    tokens = np.array([[10, 11], [20, 21]])
    log_probs = np.array([[-1.0, -1.0], [0.0, 0.0]])
    tree = build_tree(5, tokens, log_probs, 6, seed_chain=False)
    assert [tuple(path_tokens(tree, node)) for node in range(7)] == [
        (5,),
        (5, 10),
        (5, 11),
        (5, 10, 20),
        (5, 10, 21),
        (5, 11, 20),
        (5, 11, 21),
    ]


def test_a_worked_tree() -> None:
    tokens = np.array([[7, 3], [8, 4], [9, 5]])
    log_probs = np.log([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]])
    # Prefix probabilities: 7 .6, 78 .54, 3 .4, 38 .36, 789 .27, 785 .27
    tree = build_tree(1, tokens, log_probs, 5, seed_chain=False)
    assert tree.tokens.tolist() == [1, 7, 8, 3, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 2]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 3]
    assert np.exp(tree.log_probs) == pytest.approx([1.0, 0.6, 0.54, 0.4, 0.36, 0.27])
    seeded = build_tree(1, tokens, log_probs, 5)
    assert seeded.tokens.tolist() == [1, 7, 8, 9, 3, 8]
    assert seeded.parents.tolist() == [-1, 0, 1, 2, 0, 4]


def test_dtypes_and_node_count() -> None:
    tree = build_tree(3, *random_marginals(np.random.default_rng(0), 7, 16), 16)
    assert len(tree) == 17
    assert tree.tokens.dtype == np.int64
    assert tree.parents.dtype == np.int32
    assert tree.depths.dtype == np.int32
    assert tree.log_probs.dtype == np.float64


def test_float32_marginals_give_the_tree_of_their_exact_widening() -> None:
    tokens, log_probs = random_marginals(np.random.default_rng(8), 7, 16)
    single = log_probs.astype(np.float32)
    narrow, wide = (build_tree(3, tokens, p, 64) for p in (single, single.astype(np.float64)))
    assert narrow.tokens.tolist() == wide.tokens.tolist()
    assert narrow.log_probs.tolist() == wide.log_probs.tolist()


@pytest.mark.parametrize("seed_chain", [False, True])
def test_budget_zero_is_the_root_alone(seed_chain: bool) -> None:
    tree = build_tree(3, *random_marginals(np.random.default_rng(0), 7, 4), 0, seed_chain)
    assert tree.tokens.tolist() == [3]
    assert tree.parents.tolist() == [-1]
    assert tree.log_probs.tolist() == [0.0]


@pytest.mark.parametrize("seed_chain", [False, True])
@pytest.mark.parametrize(("width", "budget"), [(1, 7), (1, 40), (1, 3)])
def test_one_candidate_a_depth_gives_the_chain(width: int, budget: int, seed_chain: bool) -> None:
    tokens, log_probs = random_marginals(np.random.default_rng(4), 7, 9)
    tree = build_tree(2, tokens[:, :width], log_probs[:, :width], budget, seed_chain)
    length = min(budget, 7)
    assert tree.tokens.tolist() == [2, *tokens[:length, 0].tolist()]
    assert tree.parents.tolist() == list(range(-1, length))
    assert tree.depths.tolist() == list(range(length + 1))
    assert tree.log_probs[1:] == pytest.approx(np.cumsum(log_probs[:length, 0]))


def test_seed_with_budget_of_the_chain_is_the_chain() -> None:
    """Even where the unseeded tree would spend the budget on width."""
    tokens, log_probs = top_k_marginals(np.zeros((7, 20)), 16)
    seeded = build_tree(2, tokens, log_probs, 7)
    assert seeded.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert build_tree(2, tokens, log_probs, 7, seed_chain=False).depths.max() == 1


@pytest.mark.parametrize("seed_chain", [False, True])
def test_impossible_candidates_are_never_taken(seed_chain: bool) -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    log_probs = np.array([[log(0.5), log(0.5), -inf], [0.0, -inf, -inf], [-inf, -inf, -inf]])
    tree = build_tree(0, tokens, log_probs, 20, seed_chain)
    assert prefixes(tree) == {(1,), (2,), (1, 4), (2, 4)}


def test_a_block_of_one_drafts_nothing() -> None:
    tree = build_tree(4, np.empty((0, 3), np.int64), np.empty((0, 3)), 16)
    assert tree.tokens.tolist() == [4]


@pytest.mark.parametrize(
    ("tokens", "log_probs", "budget", "message"),
    [
        ([[1, 1]], [[-1.0, -2.0]], 4, "tokens of depth 1 must be distinct"),
        ([[1, -2]], [[-1.0, -2.0]], 4, "tokens of depth 1 must be at least 0, got -2"),
        ([[1, 2]], [[-2.0, -1.0]], 4, "log_probs must be sorted descending"),
        ([[1, 2]], [[-1.0, float("nan")]], 4, "log_probs must be sorted descending"),
        ([[1]], [[float("nan")]], 4, "log_probs must be at most 0"),
        ([[1, 2]], [[0.5, -1.0]], 4, "log_probs must be at most 0"),
        ([[1, 2]], [[-1.0, -2.0]], -1, "budget must be at least 0, got -1"),
        ([[1, 2]], [[-1.0]], 4, r"one shape \[D, K\], K >= 1, got \[1, 2\] and \[1, 1\]"),
        ([[1.0, 2.0]], [[-1.0, -2.0]], 4, "tokens must be integers, got float64"),
    ],
)
def test_bad_marginals_are_refused(
    tokens: list[list[int]], log_probs: list[list[float]], budget: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_tree(0, np.array(tokens), np.array(log_probs), budget)


def test_negative_root_token_is_refused() -> None:
    with pytest.raises(ValueError, match="root_token must be at least 0, got -1"):
        build_tree(-1, np.array([[1]]), np.array([[0.0]]), 1)


@pytest.mark.parametrize(
    ("tokens", "parents", "depths", "message"),
    [
        ([0, 1, 1], [-1, 0, 0], [0, 1, 1], "node 0 has two children with token 1"),
        ([0, 1, 2], [-1, 2, 0], [0, 1, 1], r"parent of node 1 must be in \[0, 1\), got 2"),
        ([0, 1, 2], [-1, 0, 1], [0, 1, 1], "depth of node 2 must be 2, got 1"),
        ([0], [0], [0], "node 0 must be the root"),
        ([0, 1], [-1], [0, 1], r"tree parents must be int32\[2\], got int32\[1\]"),
        ([], [], [], "at least its root"),
    ],
)
def test_arrays_that_form_no_tree_are_refused(
    tokens: list[int], parents: list[int], depths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tree(
            np.array(tokens, np.int64),
            np.array(parents, np.int32),
            np.array(depths, np.int32),
            np.zeros(len(tokens)),
        )


def test_wrong_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tree tokens must be int64\[1\], got float64\[1\]"):
        Tree(
            np.zeros(1),  # type: ignore[arg-type]
            np.array([-1], np.int32),
            np.zeros(1, np.int32),
            np.zeros(1),
        )


def test_top_k_marginals_against_a_sort() -> None:
    rng = np.random.default_rng(2)
    # Rounded so that ties are plenty, at the cut too.
    logits = np.round(rng.normal(size=(5, 300)), 1).astype(np.float32)
    for k in (1, 7, 64, 299, 300):
        tokens, log_probs = top_k_marginals(logits, k)
        assert tokens.dtype == np.int64
        assert log_probs.dtype == np.float64
        for row, found, scores in zip(logits, tokens, log_probs, strict=True):
            expected = sorted(range(300), key=lambda t: (-row[t], t))[:k]
            assert found.tolist() == expected
            total = sum(exp(float(x)) for x in row)
            assert scores == pytest.approx([log(exp(float(row[t])) / total) for t in expected])


def test_top_k_marginals_of_a_real_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(size=(7, 163_840)).astype(np.float32)
    tokens, log_probs = top_k_marginals(logits, 64)
    assert tokens.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :64].tolist()
    tree = build_tree(163_839, tokens, log_probs, 64)
    assert len(tree) == 65


def test_top_k_marginals_keeps_impossible_tokens_last() -> None:
    tokens, log_probs = top_k_marginals(np.array([[-inf, 0.0, -inf, 0.0]]), 3)
    assert tokens.tolist() == [[1, 3, 0]]
    assert log_probs.tolist() == [[-log(2), -log(2), -inf]]


@pytest.mark.parametrize("bad", [float("nan"), inf])
def test_top_k_marginals_refuses_logits_without_a_finite_maximum(bad: float) -> None:
    with pytest.raises(ValueError, match="logits of depth 2 must have a finite maximum"):
        top_k_marginals(np.array([[0.0, 1.0], [bad, 1.0]]), 1)
    with pytest.raises(ValueError, match="logits of depth 1 must have a finite maximum, got -inf"):
        top_k_marginals(np.full((1, 4), -inf), 1)


@pytest.mark.parametrize("k", [0, 5])
def test_top_k_marginals_refuses_k_outside_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k must be in \[1, 4\] \(the vocabulary\), got {k}"):
        top_k_marginals(np.zeros((1, 4)), k)
