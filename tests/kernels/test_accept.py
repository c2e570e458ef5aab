"""accept_greedy and accept_sampled, their device code compiled for the CPU, against ddtree."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-torch")

import torch

from longleaf.ddtree import SamplingParams
from longleaf_kernels import DraftTrees, SamplingTensors
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
@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(12, torch.float32), (3001, torch.bfloat16), (12_800, torch.float32)]
)
def test_sampled_walks_are_those_of_ddtree(
    operators: EmulatedOperators, vocabulary: int, dtype: torch.dtype, every_node: bool
) -> None:
    rng = np.random.default_rng(vocabulary)
    trees = draft_trees(rng, len(PARAMS), depth=5, vocabulary=min(vocabulary, 12), budget=8)
    logits = torch.from_numpy(rng.normal(size=(len(PARAMS), 9, vocabulary)) * 2.5).to(dtype)
    for request, node, parent in edges(trees):
        logits[request, parent, trees.tokens[request, node]] += 12.0
    lengths = check_accept_sampled(
        operators, trees, logits, PARAMS, rng.random((len(PARAMS), 6)), every_node
    )
    assert max(lengths) >= 3


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=1.0, top_k=1024),
    SamplingParams(temperature=1.0, top_k=5000),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=5000, top_p=0.9, min_p=0.001),
]


def rows(rng: np.random.Generator, kind: str, batch: int, vocabulary: int) -> torch.Tensor:
    """Logits [batch, 2, vocabulary] of the target: flat, of one value, with many ties, ..."""
    noise = torch.from_numpy(rng.normal(size=(batch, 2, vocabulary))).float()
    if kind == "peaked":
        noise[..., rng.integers(vocabulary)] += 6.0
    scales = {"flat": 0.01, "equal": 0.0, "coarse": 2.0, "usual": 2.5, "peaked": 2.5}
    logits = scales[kind] * noise
    return logits.round() if kind == "coarse" else logits


def lone_roots(batch: int, vocabulary: int) -> DraftTrees:
    """Trees whose one child no draw takes, for a draw a request."""
    trees = draft_trees(np.random.default_rng(0), batch, depth=1, vocabulary=5, budget=1)
    trees.tokens[:, 1] = vocabulary
    return trees


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(7, torch.float32), (3001, torch.float32), (163_840, torch.float32), (9000, torch.bfloat16)],
)
@pytest.mark.parametrize("kind", ["usual", "peaked", "flat", "equal", "coarse"])
def test_filters_keep_what_those_of_ddtree_keep(
    operators: EmulatedOperators, kind: str, vocabulary: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rows(rng, kind, len(FILTERS), vocabulary).to(dtype)
    trees = lone_roots(len(FILTERS), vocabulary)
    uniforms = rng.random((len(FILTERS), 1))
    check_accept_sampled(operators, trees, logits, FILTERS, uniforms, every_node=False)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6])
def test_equal_logits_are_kept_by_lower_token(operators: EmulatedOperators, top_k: int) -> None:
    logits = torch.full((1, 2, 1000), -3.0)
    logits[..., [900, 10, 500, 130]] = 1.0
    logits[..., 700] = 1.5
    kept = [700, 10, 130, 500, 900, 0][:top_k]
    params = [SamplingParams(top_k=top_k, temperature=4.0)]
    for u, token in ((0.0, min(kept)), (1.0, max(kept))):
        if top_k == 1:
            token = 700
        out = operators.accept_sampled(
            lone_roots(1, 1000),
            logits,
            sampling_tensors(params),
            torch.tensor([[u]], dtype=torch.float64),
            True,
        )
        assert int(out.bonus[0]) == token


@pytest.mark.parametrize("batch", [3, 32])
def test_a_draw_does_not_depend_on_the_batch(operators: EmulatedOperators, batch: int) -> None:
    """Alone, among others, along the walk or at every node: the same token."""
    rng = np.random.default_rng(batch)
    vocabulary = 700
    logits = rows(rng, "usual", batch, vocabulary)
    params = [FILTERS[i % len(FILTERS)] for i in range(batch)]
    trees = lone_roots(batch, vocabulary)
    sampling = sampling_tensors(params)
    uniforms = torch.from_numpy(rng.random((batch, 1)))
    together = operators.accept_sampled(trees, logits, sampling, uniforms, False).bonus
    at_once = operators.accept_sampled(trees, logits, sampling, uniforms, True).bonus
    assert together.tolist() == at_once.tolist()
    for i in range(0, batch, max(1, batch // 3)):
        alone = operators.accept_sampled(
            lone_roots(1, vocabulary),
            logits[i : i + 1],
            SamplingTensors(*(tensor[i : i + 1] for tensor in sampling)),
            uniforms[i : i + 1],
            False,
        )
        assert int(alone.bonus[0]) == int(together[i])


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


def test_nan_is_a_forbidden_token(operators: EmulatedOperators) -> None:
    logits = torch.full((1, 2, 90), torch.nan)
    logits[..., [20, 70]] = torch.tensor([0.0, 0.5])
    for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=60)):
        drawn = [
            int(
                operators.accept_sampled(
                    lone_roots(1, 90),
                    logits,
                    sampling_tensors([params]),
                    torch.tensor([[u]], dtype=torch.float64),
                    False,
                ).bonus[0]
            )
            for u in (0.0, 0.37, 0.38, 1.0)  # the border is at 1 / (1 + sqrt(e)) = 0.3775
        ]
        assert drawn == [20, 20, 70, 70]


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
    check_draw_distribution(operators, params, draws=400)
