"""Properties that hold for every tree, whatever the drafter says."""

from math import inf

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.ddtree import (
    Tree,
    accept_greedy,
    ancestor_bits,
    build_tree,
    committed_tokens,
    compaction_plan,
    dense_mask,
    positions,
    step_outcome,
)
from tests.ddtree.toy import prefixes

Drafts = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
VOCABULARY = 12
every_case = settings(deadline=None, derandomize=True, max_examples=200, database=None)


@st.composite
def drafts(draw: st.DrawFn) -> Drafts:
    """Marginals of any shape up to depth 7, width 6; repeated, zero and impossible scores."""
    depth = draw(st.integers(1, 7))
    width = draw(st.integers(1, 6))
    score = st.one_of(
        st.floats(-40.0, 0.0), st.sampled_from([0.0, -0.5, -1.0, -inf]), st.just(-1e300)
    )
    tokens, scores = [], []
    for _ in range(depth):
        tokens.append(draw(st.permutations(range(VOCABULARY)))[:width])
        scores.append(sorted(draw(st.lists(score, min_size=width, max_size=width)), reverse=True))
    return np.array(tokens, np.int64), np.array(scores, np.float64)


budgets = st.integers(0, 40)


@given(drafts(), budgets, st.booleans())
@every_case
def test_shape_of_every_tree(marginals: Drafts, budget: int, seed_chain: bool) -> None:
    tokens, log_probs = marginals
    tree = build_tree(3, tokens, log_probs, budget, seed_chain)
    assert 1 <= len(tree) <= budget + 1
    assert tree.parents[0] == -1
    assert tree.depths[0] == 0
    assert tree.depths.max() <= len(tokens)
    siblings: set[tuple[int, int]] = set()
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        assert 0 <= parent < node  # hence ancestor-closed
        assert tree.depths[node] == tree.depths[parent] + 1
        row = tree.depths[parent]
        rank = tokens[row].tolist().index(tree.tokens[node])
        assert tree.log_probs[node] == tree.log_probs[parent] + log_probs[row, rank] > -inf
        siblings.add((parent, int(tree.tokens[node])))
    assert len(siblings) == len(tree) - 1


@given(drafts(), budgets, st.booleans())
@every_case
def test_a_larger_budget_only_adds_nodes(marginals: Drafts, budget: int, seed_chain: bool) -> None:
    """Once the chain fits, a tree is the head of every larger one."""
    budget = max(budget, len(marginals[0]))
    small, large = (build_tree(3, *marginals, b, seed_chain) for b in (budget, budget + 5))
    assert large.tokens[: len(small)].tolist() == small.tokens.tolist()
    assert large.parents[: len(small)].tolist() == small.parents.tolist()


@given(drafts(), budgets)
@every_case
def test_no_prefix_left_out_beats_one_taken(marginals: Drafts, budget: int) -> None:
    tree = build_tree(3, *marginals, budget, seed_chain=False)
    assert (np.diff(tree.log_probs) <= 0.0).all()
    complete = build_tree(3, *marginals, budget + 1, seed_chain=False)
    if len(complete) > len(tree):
        assert complete.log_probs[-1] <= tree.log_probs.min()


@given(drafts(), budgets, st.lists(st.integers(0, VOCABULARY - 1), min_size=8, max_size=8))
@every_case
def test_seeded_tree_holds_the_chain_and_accepts_no_less(
    marginals: Drafts, budget: int, text: list[int]
) -> None:
    """For every text that the target may choose, true to the drafter's greedy guess or not."""
    tokens, log_probs = marginals
    length = min(budget, int(np.isfinite(np.cumsum(log_probs[:, 0])).sum()))
    spine = tokens[:length, 0].tolist()
    tree = build_tree(3, tokens, log_probs, budget)
    assert tree.tokens[1 : length + 1].tolist() == spine
    assert tree.parents[: length + 1].tolist() == list(range(-1, length))
    for target in (text, [*spine, *text][:8], [*spine[: length // 2], *text][:8]):
        argmax = np.array([target[d] for d in tree.depths])
        accepted = accept_greedy(tree, argmax)
        on_chain = 0
        while on_chain < length and spine[on_chain] == target[on_chain]:
            on_chain += 1
        outcome = step_outcome(accepted)
        assert outcome.accepted_drafts >= on_chain
        assert outcome.accepted_drafts == longest_match(tree, target)
        assert committed_tokens(tree, accepted) == target[: outcome.commit_len]


def longest_match(tree: Tree, target: list[int]) -> int:
    members = prefixes(tree)
    return max((d for d in range(1, 8) if tuple(target[:d]) in members), default=0)


@given(drafts(), budgets, st.integers(0, 200_000))
@every_case
def test_visibility_and_positions(marginals: Drafts, budget: int, prefix_len: int) -> None:
    tree = build_tree(3, *marginals, budget)
    mask = dense_mask(ancestor_bits(tree), len(tree))
    where = positions(tree, prefix_len)
    for node in range(len(tree)):
        seen = {node}
        while tree.parents[min(seen)] >= 0:
            seen.add(int(tree.parents[min(seen)]))
        assert set(np.flatnonzero(mask[node]).tolist()) == seen
        # A node sees one token of each position from the root's to its own.
        assert sorted(where[list(seen)].tolist()) == list(range(prefix_len, where[node] + 1))


@given(st.lists(st.integers(1, 300), unique=True, max_size=9), st.integers(1, 3))
@every_case
def test_compaction_is_the_gather_of_the_path(rest: list[int], columns: int) -> None:
    path = np.array([0, *sorted(rest)], np.int32)
    rows = np.arange(301 * columns).reshape(301, columns)
    plan = compaction_plan(path)
    expected = rows[path]
    gathered, one_by_one = rows.copy(), rows.copy()
    plan.apply(gathered)
    for src, dst in zip(plan.src, plan.dst, strict=True):
        one_by_one[dst] = one_by_one[src]
    assert gathered[: len(path)].tolist() == expected.tolist()
    assert one_by_one.tolist() == gathered.tolist()
    assert gathered[len(path) :].tolist() == rows[len(path) :].tolist()
    assert (plan.dst < plan.src).all()
    assert len(plan) == sum(node != row for row, node in enumerate(path))
