"""The walks on toy autoregressive models: lossless, and seeded answers independent of the tree."""

import numpy as np
import numpy.typing as npt
import pytest

from longleaf.ddtree import (
    Accepted,
    SamplingParams,
    Tree,
    accept_greedy,
    accept_sampled,
    build_tree,
    committed_tokens,
    draw,
    shorten,
    step_outcome,
    target_distribution,
)
from tests.ddtree.toy import ToyModel

LENGTH = 120
DEPTH = 7


def uniforms_by_position(seed: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).random(2 * LENGTH)


def decode_plain(
    model: ToyModel, prompt: list[int], params: SamplingParams, uniforms: npt.NDArray[np.float64]
) -> list[int]:
    context = list(prompt)
    for position in range(LENGTH):
        probs = target_distribution(model.logits(context), params)
        context.append(draw(probs, float(uniforms[position])))
    return context[len(prompt) :]


def decode_tree(
    model: ToyModel,
    prompt: list[int],
    params: SamplingParams,
    uniforms: npt.NDArray[np.float64],
    budget: int,
    k: int,
    seed_chain: bool,
) -> tuple[list[int], list[int]]:
    """Return the tokens and the commit_len of each step."""
    context, lengths = list(prompt), []
    while (done := len(context) - len(prompt)) < LENGTH:
        tree = model.draft(context, k, budget, seed_chain)
        logits = model.verify(context, tree)
        if params.greedy:
            accepted = accept_greedy(tree, logits.argmax(axis=1))
            again = accept_sampled(tree, logits, params, uniforms[done:])
            assert again.path.tolist() == accepted.path.tolist()
            assert again.bonus_token == accepted.bonus_token
        else:
            accepted = accept_sampled(tree, logits, params, uniforms[done:])
        context += committed_tokens(tree, accepted)
        lengths.append(step_outcome(accepted).commit_len)
    assert sum(lengths) == len(context) - len(prompt)
    return context[len(prompt) :][:LENGTH], lengths


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.0),
        SamplingParams(1.0),
        SamplingParams(0.6, top_p=0.9, top_k=5, min_p=0.02),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("budget", "k", "seed_chain"),
    [(0, 1, True), (7, 1, True), (16, 6, True), (16, 6, False), (40, 8, False)],
)
def test_tree_decoding_equals_plain_decoding_token_for_token(
    params: SamplingParams, budget: int, k: int, seed_chain: bool
) -> None:
    longest = 0
    for seed, noise in enumerate((0.0, 0.5, 2.0, 8.0)):
        model = ToyModel.random(8, DEPTH, noise, seed)
        uniforms = uniforms_by_position(seed)
        expected = decode_plain(model, [seed, 3], params, uniforms)
        text, lengths = decode_tree(model, [seed, 3], params, uniforms, budget, k, seed_chain)
        assert text == expected
        longest = max(longest, *lengths)
    # The walk went deep somewhere, or the equality above would say little. Without the seed a
    # tree of 16 need not reach the last depth.
    assert longest >= min(budget, 5 if not seed_chain else DEPTH) + 1


def test_the_tree_commits_more_than_the_chain() -> None:
    steps = {}
    for name, budget, k in (("chain", 7, 1), ("tree", 16, 6)):
        steps[name] = sum(
            len(
                decode_tree(
                    ToyModel.random(8, DEPTH, 2.0, seed),
                    [0, 1],
                    SamplingParams(0.0),
                    uniforms_by_position(0),
                    budget,
                    k,
                    True,
                )[1]
            )
            for seed in range(6)
        )
    assert steps["tree"] < steps["chain"]


def small_tree() -> Tree:
    """0: root 5; 1: 7 and 2: 8 below it; 3: 7 and 4: 9 below node 2; 5: 6 below node 4."""
    return Tree(
        np.array([5, 7, 8, 7, 9, 6], np.int64),
        np.array([-1, 0, 0, 2, 2, 4], np.int32),
        np.array([0, 1, 1, 2, 2, 3], np.int32),
        np.array([0.0, -1.0, -1.5, -2.0, -2.5, -3.0]),
    )


@pytest.mark.parametrize(
    ("argmax", "path", "bonus"),
    [
        ([8, 0, 9, 0, 6, 3], [0, 2, 4, 5], 3),
        ([8, 0, 7, 2, 0, 0], [0, 2, 3], 2),
        ([8, 0, 5, 0, 0, 0], [0, 2], 5),
        # 9 stands below node 2 alone: a match elsewhere is none.
        ([9, 0, 0, 0, 0, 0], [0], 9),
        ([7, 8, 9, 9, 9, 9], [0, 1], 8),
    ],
)
def test_greedy_walk_by_hand(argmax: list[int], path: list[int], bonus: int) -> None:
    tree = small_tree()
    accepted = accept_greedy(tree, np.array(argmax))
    assert accepted.path.dtype == np.int32
    assert accepted.path.tolist() == path
    assert accepted.bonus_token == bonus
    assert accepted.depth == len(path) - 1
    assert committed_tokens(tree, accepted) == [*tree.tokens[path[1:]].tolist(), bonus]


def test_sampled_walk_uses_the_uniform_of_the_depth() -> None:
    tree = small_tree()
    logits = np.zeros((6, 10), np.float32)  # u in [t / 10, (t + 1) / 10) draws token t
    accepted = accept_sampled(tree, logits, SamplingParams(), np.array([0.85, 0.95, 0.65, 0.05]))
    assert accepted.path.tolist() == [0, 2, 4, 5]
    assert accepted.bonus_token == 0
    accepted = accept_sampled(tree, logits, SamplingParams(), np.array([0.85, 0.05, 0.65, 0.05]))
    assert accepted.path.tolist() == [0, 2]
    assert accepted.bonus_token == 0


def test_shorten_cuts_tokens_path_and_depth_alike() -> None:
    tree = small_tree()
    accepted = accept_greedy(tree, np.array([8, 0, 9, 0, 6, 3]))
    text = committed_tokens(tree, accepted)
    assert text == [8, 9, 6, 3]
    for commit_len in (1, 2, 3, 4):
        cut = shorten(tree, accepted, commit_len)
        assert committed_tokens(tree, cut) == text[:commit_len]
        assert step_outcome(cut).commit_len == commit_len
        assert step_outcome(cut).accepted_depth == commit_len - 1
    for commit_len in (0, 5):
        with pytest.raises(ValueError, match=r"commit_len must be in \[1, 4\]"):
            shorten(tree, accepted, commit_len)


def test_inputs_of_another_tree_are_refused() -> None:
    tree = build_tree(0, np.array([[1], [2]]), np.zeros((2, 1)), 2)
    params = SamplingParams()
    with pytest.raises(ValueError, match=r"argmax_tokens must be \[3\], got shape \[2\]"):
        accept_greedy(tree, np.array([1, 2]))
    with pytest.raises(ValueError, match=r"logits must be \[3, V\], got shape \[2, 4\]"):
        accept_sampled(tree, np.zeros((2, 4)), params, np.zeros(3))
    with pytest.raises(ValueError, match=r"uniforms must be \[3\] or longer, got shape \[2\]"):
        accept_sampled(tree, np.zeros((3, 4)), params, np.zeros(2))


def test_accepted_of_the_root_alone() -> None:
    tree = build_tree(9, np.array([[1]]), np.zeros((1, 1)), 0)
    accepted: Accepted = accept_greedy(tree, np.array([1]))
    assert accepted.path.tolist() == [0]
    assert committed_tokens(tree, accepted) == [1]
