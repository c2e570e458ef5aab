"""accept_greedy and accept_sampled, their device code compiled for the CPU, against ddtree."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch

from longleaf.ddtree import SamplingParams
from tests.kernels.operators import EmulatedOperators
from tests.kernels.tree_cases import (
    check_accept_greedy,
    check_accept_sampled,
    check_draw_distribution,
    draft_trees,
    edges,
    sampling_tensors,
)

pytestmark = pytest.mark.torch
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=2.0, top_p=0.999),
]


@pytest.fixture(scope="module")
def operators(emulated_library: Path) -> EmulatedOperators:
    return EmulatedOperators(emulated_library)


@pytest.mark.parametrize("budget", [0, 1, 7, 8, 40, 64, 127])
def test_greedy_walks_are_those_of_ddtree(operators: EmulatedOperators, budget: int) -> None:
    rng = np.random.default_rng(budget)
    trees = draft_trees(rng, batch=12, depth=7, vocabulary=6, budget=max(budget, 1))
    target_tokens = torch.from_numpy(rng.integers(6, size=tuple(trees.tokens.shape)))
    for request, node, parent in edges(trees):  # most nodes go on to some child
        if rng.random() < 0.8:
            target_tokens[request, parent] = trees.tokens[request, node]
    lengths = check_accept_greedy(operators, trees, target_tokens, max_path=8)
    if budget >= 7:
        assert max(lengths) >= 4
        assert len(set(lengths)) > 1


def test_a_greedy_walk_reaches_the_last_depth_of_a_spine(operators: EmulatedOperators) -> None:
    trees = draft_trees(np.random.default_rng(0), batch=1, depth=7, vocabulary=9, budget=7)
    chain = torch.roll(trees.tokens, -1, dims=1)
    assert check_accept_greedy(operators, trees, chain, max_path=8) == [8]


def test_a_walk_stops_at_max_path(operators: EmulatedOperators) -> None:
    trees = draft_trees(np.random.default_rng(0), batch=1, depth=7, vocabulary=9, budget=7)
    chain = torch.roll(trees.tokens, -1, dims=1)
    out = operators.accept_greedy(trees.tokens, trees.parents, chain, 3)
    assert out.path.tolist() == [[0, 1, 2]]
    assert out.path_len.tolist() == [3]
    assert out.bonus.tolist() == [int(trees.tokens[0, 3])]


@pytest.mark.parametrize("every_node", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [12, 3001, 12_800])
def test_sampled_walks_are_those_of_ddtree(
    operators: EmulatedOperators, vocabulary: int, dtype: torch.dtype, every_node: bool
) -> None:
    rng = np.random.default_rng(vocabulary)
    trees = draft_trees(rng, len(PARAMS), depth=5, vocabulary=min(vocabulary, 12), budget=20)
    logits = torch.from_numpy(rng.normal(size=(len(PARAMS), 21, vocabulary)) * 2.5).to(dtype)
    for request, node, parent in edges(trees):
        logits[request, parent, trees.tokens[request, node]] += 12.0
    lengths = check_accept_sampled(
        operators, trees, logits, PARAMS, rng.random((len(PARAMS), 6)), every_node
    )
    assert max(lengths) >= 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=0.97),
        SamplingParams(temperature=1.0, top_k=2500),
        SamplingParams(temperature=1.0, top_k=2500, top_p=0.9),
        SamplingParams(temperature=3.0, top_k=5000, top_p=0.99, min_p=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["flat", "equal", "coarse"])
def test_distributions_too_flat_for_the_list(
    operators: EmulatedOperators, kind: str, params: SamplingParams
) -> None:
    rng = np.random.default_rng(3)
    trees = draft_trees(rng, batch=1, depth=2, vocabulary=6000, budget=3)
    noise = torch.from_numpy(rng.normal(size=(1, 4, 6000))).float()
    logits = {"flat": 0.01 * noise, "equal": 0.0 * noise, "coarse": noise.round()}[kind]
    for u in (0.0, 0.3103, 0.7707, 0.9991):
        check_accept_sampled(operators, trees, logits, [params], np.full((1, 3), u), True)


def test_uniforms_at_the_ends_never_draw_an_impossible_token(operators: EmulatedOperators) -> None:
    trees = draft_trees(np.random.default_rng(0), batch=4, depth=1, vocabulary=5, budget=1)
    logits = torch.full((4, 2, 1000), -torch.inf)
    logits[..., 300:310] = 0.0
    uniforms = np.array([[0.0] * 2, [1.0] * 2, [np.nextafter(1.0, 0.0)] * 2, [0.55] * 2])
    params = [SamplingParams()] * 4
    check_accept_sampled(operators, trees, logits, params, uniforms, every_node=False)
    sampled = operators.accept_sampled(
        trees, logits, sampling_tensors(params), torch.from_numpy(uniforms), True
    )
    assert sampled.bonus.tolist() == [300, 309, 309, 305]


@pytest.mark.parametrize("row", [[-torch.inf] * 4, [0.0, torch.inf, 1.0, torch.inf]], ids=str)
def test_a_row_without_a_finite_maximum_gives_its_argmax(
    operators: EmulatedOperators, row: list[float]
) -> None:
    trees = draft_trees(np.random.default_rng(0), batch=1, depth=1, vocabulary=5, budget=1)
    logits = torch.tensor(row).expand(1, 2, 4).contiguous()
    uniforms = torch.full((1, 2), 0.9, dtype=torch.float64)
    out = operators.accept_sampled(
        trees, logits, sampling_tensors([SamplingParams()]), uniforms, False
    )
    assert out.bonus.tolist() == [int(np.argmax(row))]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.7, top_p=0.8, min_p=0.05)], ids=str
)
def test_draws_follow_the_target_distribution(
    operators: EmulatedOperators, params: SamplingParams
) -> None:
    check_draw_distribution(operators, params, draws=1000)
