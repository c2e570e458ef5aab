"""build_tree, expand_tree and accept on a GPU against ddtree, and as a server runs them: in
CUDA graphs whose inputs change between replays, with workspaces that live on."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import longleaf_kernels
from longleaf.ddtree import SamplingParams, top_k_marginals
from longleaf_kernels import (
    accept_greedy,
    accept_sampled,
    accept_workspace,
    build_tree,
    build_tree_workspace,
)
from tests.kernels.operators import GpuOperators
from tests.kernels.tree_cases import (
    check_accept_greedy,
    check_accept_sampled,
    check_build_tree,
    check_draw_distribution,
    check_expand_tree,
    draft_trees,
    edges,
    sampling_tensors,
)

KIMI_VOCABULARY = 163_840


@pytest.fixture(scope="module")
def operators() -> GpuOperators:
    return GpuOperators()


@pytest.mark.parametrize("seed_chain", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 7, 32, 33, 64, 65, 127])
def test_expand_tree(operators: GpuOperators, budget: int, seed_chain: bool) -> None:
    rng = np.random.default_rng(budget)
    for depth, width in ((7, 130), (15, 64), (1, 9), (3, 1)):
        pairs = [top_k_marginals(rng.normal(size=(depth, 4 * width)), width) for _ in range(16)]
        tokens, log_probs = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
        check_expand_tree(operators, tokens, log_probs, budget, seed_chain)
        steps = np.sort(rng.integers(0, 6, size=log_probs.shape) / 8.0, axis=-1)  # ties
        check_expand_tree(operators, tokens, -steps, budget, seed_chain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "vocabulary"), [(32, 40), (5, 8193), (1, 151_936), (2, KIMI_VOCABULARY)]
)
def test_build_tree(
    operators: GpuOperators, batch: int, vocabulary: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocabulary + batch)
    logits = (4.0 * torch.randn(batch, 7, vocabulary, generator=generator)).to(dtype)
    for budget in (8, 64, 127):
        check_build_tree(operators, logits, budget, seed_chain=budget != 8)


@pytest.mark.parametrize("kind", ["equal", "ascending", "one-thread", "last-tile"])
def test_build_tree_from_rows_that_defeat_the_threshold(operators: GpuOperators, kind: str) -> None:
    at = torch.arange(17_000)
    row = {
        "equal": torch.zeros(17_000),
        "ascending": at.float(),
        "one-thread": (at % 2048 == 5) * 50.0 + at % 7,
        "last-tile": at // 8192 * 100.0 + at % 3,
    }[kind]
    check_build_tree(operators, row.expand(2, 3, -1).contiguous(), 64, seed_chain=False)


def test_build_tree_twice_gives_the_same_bits_in_any_batch(operators: GpuOperators) -> None:
    logits = torch.randn(8, 7, KIMI_VOCABULARY, generator=torch.Generator().manual_seed(1))
    roots = torch.arange(8)
    together = operators.build_tree(logits, roots, roots, 64, True)
    again = operators.build_tree(logits, roots, roots, 64, True)
    alone = operators.build_tree(logits[3:4], roots[3:4], roots[3:4], 64, True)
    for first, second, third in zip(sum(together, ()), sum(again, ()), sum(alone, ()), strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[3:4], third)


def test_top_k_marginals_are_those_of_build_tree() -> None:
    logits = torch.randn(2, 7, 30_000, device="cuda")
    roots = torch.zeros(2, dtype=torch.int64, device="cuda")
    _, expected = build_tree(logits, roots, 48)
    for got, wanted in zip(longleaf_kernels.top_k_marginals(logits, 48), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_graph_of_build_and_accept_replays_on_new_inputs(operators: GpuOperators) -> None:
    """One workspace for both shapes of launch; outputs poisoned before each replay."""
    batch, depth, vocabulary, budget = 3, 7, KIMI_VOCABULARY, 64
    logits = torch.zeros(batch, depth, vocabulary, device="cuda")
    roots = torch.zeros(batch, dtype=torch.int64, device="cuda")
    prefix_lens = torch.zeros_like(roots)
    targets = torch.zeros(batch, budget + 1, dtype=torch.int64, device="cuda")
    workspace = build_tree_workspace(batch, depth, vocabulary, budget, "cuda")

    def step() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        trees, marginals = build_tree(logits, roots, budget, True, prefix_lens, workspace)
        accepted = accept_greedy(trees.tokens, trees.parents, targets, depth + 1)
        return (*trees, *marginals), accepted

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built, accepted = step()
    generator = torch.Generator(device="cuda").manual_seed(3)
    for replay in range(20):
        logits.normal_(0.0, 3.0, generator=generator)
        roots.random_(0, vocabulary, generator=generator)
        prefix_lens.random_(0, 200_000, generator=generator)
        targets.copy_(logits[:, :1].argmax(-1).expand(-1, budget + 1))
        for tensor in (*built, *accepted):
            tensor.fill_(-7)
        graph.replay()
        fresh, _ = operators.build_tree(logits.cpu(), roots.cpu(), prefix_lens.cpu(), budget, True)
        for name, got, wanted in zip(fresh._fields, built, fresh, strict=False):
            assert torch.equal(got.cpu(), wanted), (replay, name)
        assert accepted[1].tolist() == [2] * batch  # the chain's first token, then a miss
        assert (accepted[0][:, :3].cpu() == torch.tensor([0, 1, -1])).all()


@pytest.mark.parametrize("budget", [1, 8, 64, 127])
def test_greedy_walks(operators: GpuOperators, budget: int) -> None:
    rng = np.random.default_rng(budget)
    trees = draft_trees(rng, batch=32, depth=7, vocabulary=6, budget=budget)
    targets = torch.from_numpy(rng.integers(6, size=tuple(trees.tokens.shape)))
    for request, node, parent in edges(trees):
        if rng.random() < 0.8:
            targets[request, parent] = trees.tokens[request, node]
    lengths = check_accept_greedy(operators, trees, targets, max_path=8)
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("every_node", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [3001, KIMI_VOCABULARY])
def test_sampled_walks(
    operators: GpuOperators, vocabulary: int, dtype: torch.dtype, every_node: bool
) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_p=0.95),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=3.0, top_p=0.99),  # nearly all that there is
        SamplingParams(temperature=1.0, top_k=1024),
        SamplingParams(temperature=1.3, top_k=5000, top_p=0.9),
    ]
    rng = np.random.default_rng(vocabulary)
    trees = draft_trees(rng, len(params), depth=5, vocabulary=12, budget=16)
    logits = torch.from_numpy(rng.normal(size=(len(params), 17, vocabulary)).astype(np.float32))
    logits = (2.5 * logits).to(dtype)
    for request, node, parent in edges(trees):
        logits[request, parent, trees.tokens[request, node]] += 14.0
    uniforms = rng.random((len(params), 6))
    lengths = check_accept_sampled(operators, trees, logits, params, uniforms, every_node)
    assert max(lengths) >= 3


def test_draws_follow_the_target_distribution(operators: GpuOperators) -> None:
    for params in (SamplingParams(), SamplingParams(0.7, top_p=0.8, min_p=0.05)):
        check_draw_distribution(operators, params, draws=40_000)


def test_sampled_walks_are_the_same_both_ways_and_in_a_graph() -> None:
    """Draws at every node or along the walk, eager or replayed: the same tokens."""
    rng = np.random.default_rng(2)
    trees = draft_trees(rng, batch=4, depth=7, vocabulary=12, budget=64)
    tokens, parents, depths = (t.cuda() for t in (trees.tokens, trees.parents, trees.depths))
    logits = 3.0 * torch.randn(4, 65, KIMI_VOCABULARY, device="cuda")
    sampling = sampling_tensors([SamplingParams(0.9, top_p=0.95)] * 4)
    sampling = type(sampling)(*(tensor.cuda() for tensor in sampling))
    uniforms = torch.rand(4, 8, dtype=torch.float64, device="cuda")
    workspace = accept_workspace(4, 65, "cuda")
    arguments = tokens, parents, depths, logits, sampling, uniforms, workspace
    graph = torch.cuda.CUDAGraph()
    accept_sampled(*arguments, every_node=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = accept_sampled(*arguments, every_node=True)
    for _ in range(5):
        uniforms.uniform_()
        graph.replay()
        along = accept_sampled(*arguments, every_node=False)
        for got, wanted in zip(replayed, along, strict=True):
            assert torch.equal(got, wanted)
