"""What tree operators must do, on whatever runs them: each function holds one call to ddtree."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from longleaf.ddtree import (
    Accepted,
    SamplingParams,
    Tree,
    accept_greedy,
    ancestor_bits,
    build_tree,
    dense_mask,
    positions,
    target_distribution,
    top_k_marginals,
)
from longleaf_kernels import DraftTrees, SamplingTensors
from tests.kernels.operators import Operators

Floats = npt.NDArray[np.floating]
BORDER = 4e-6
"""Of the mass: how far float32 weights and sums may move the border between two tokens."""
LOG_PROB_ERROR = 2e-6
"""Float32 exponentials, summed in float32 within a tile of 8,192 and in float64 across tiles."""


def tree_of(trees: DraftTrees, request: int) -> Tree:
    """One request's tree as ddtree has it; its constructor checks that it is a tree."""
    n = int(trees.count[request])
    return Tree(
        trees.tokens[request, :n].numpy(),
        trees.parents[request, :n].numpy(),
        trees.depths[request, :n].numpy(),
        trees.log_probs[request, :n].numpy(),
    )


def assert_same_tree(trees: DraftTrees, request: int, expected: Tree, prefix_len: int) -> None:
    got = tree_of(trees, request)
    n = len(expected)
    for name in ("tokens", "parents", "depths"):
        assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
    assert got.log_probs.tobytes() == expected.log_probs.tobytes()
    assert trees.positions[request, :n].tolist() == positions(expected, prefix_len).tolist()
    visible = trees.visible[request].numpy().view(np.uint64)
    padded = len(visible)
    mask = dense_mask(visible, padded)
    assert (mask[:n, :n] == dense_mask(ancestor_bits(expected), n)).all()
    assert not mask[:n, n:].any()
    # Rows past the count: safe to verify, child of none.
    assert (mask[n:] == np.eye(padded, dtype=np.bool_)[n:]).all()
    assert trees.tokens[request, n:].tolist() == [int(expected.tokens[0])] * (padded - n)
    assert trees.parents[request, n:].tolist() == [-1] * (padded - n)
    assert trees.depths[request, n:].tolist() == [0] * (padded - n)
    assert trees.positions[request, n:].tolist() == [prefix_len] * (padded - n)
    assert trees.log_probs[request, n:].tolist() == [-np.inf] * (padded - n)


def check_expand_tree(
    operators: Operators,
    tokens: npt.NDArray[np.int64],
    log_probs: npt.NDArray[np.float64],
    budget: int,
    seed_chain: bool,
) -> None:
    """Marginals [batch, depth, k]: the very tree of ddtree.build_tree."""
    batch = len(tokens)
    roots, prefix_lens = 1000 + torch.arange(batch), 7 * torch.arange(batch)
    trees = operators.expand_tree(
        torch.from_numpy(tokens),
        torch.from_numpy(log_probs),
        roots,
        prefix_lens,
        budget,
        seed_chain,
    )
    for i in range(batch):
        expected = build_tree(int(roots[i]), tokens[i], log_probs[i], budget, seed_chain)
        assert_same_tree(trees, i, expected, int(prefix_lens[i]))


def check_build_tree(
    operators: Operators, logits: torch.Tensor, budget: int, seed_chain: bool
) -> None:
    """Logits [batch, depth, vocabulary]: ddtree's tokens, its log-probabilities but for rounding,
    and bit for bit its tree on the operator's own marginals."""
    batch, _, vocabulary = logits.shape
    roots, prefix_lens = 3 + torch.arange(batch), 100_000 + torch.arange(batch)
    trees, marginals = operators.build_tree(logits, roots, prefix_lens, budget, seed_chain)
    k = min(max(budget, 1), vocabulary)
    exact_logits = logits.float().numpy()
    for i in range(batch):
        tokens, log_probs = top_k_marginals(exact_logits[i], k)
        assert marginals.tokens[i].tolist() == tokens.tolist()
        own = marginals.log_probs[i].numpy()
        possible = np.isfinite(log_probs)
        assert (own[~possible] == -np.inf).all()
        assert np.abs(own[possible] - log_probs[possible]).max() < LOG_PROB_ERROR
        exact_sum = torch.logsumexp(logits[i].double(), dim=-1)
        assert (marginals.log_sum_exp[i] - exact_sum).abs().max() < LOG_PROB_ERROR
        expected = build_tree(int(roots[i]), tokens, own, budget, seed_chain)
        assert_same_tree(trees, i, expected, int(prefix_lens[i]))


def sampling_tensors(params: list[SamplingParams]) -> SamplingTensors:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

    return SamplingTensors(
        temperature=column("temperature", torch.float32),
        top_p=column("top_p", torch.float32),
        top_k=column("top_k", torch.int32),
        min_p=column("min_p", torch.float32),
    )


def as_float32(params: SamplingParams) -> SamplingParams:
    """What the operator is given: parameters rounded to float32."""
    return SamplingParams(
        temperature=float(np.float32(params.temperature)),
        top_p=float(np.float32(params.top_p)),
        top_k=params.top_k,
        min_p=float(np.float32(params.min_p)),
    )


def draft_trees(
    rng: np.random.Generator, batch: int, depth: int, vocabulary: int, budget: int
) -> DraftTrees:
    """Trees of random marginals, padded as the operators pad them, built by ddtree."""
    n = budget + 1
    trees = DraftTrees(
        tokens=torch.zeros(batch, n, dtype=torch.int64),
        parents=torch.full((batch, n), -1, dtype=torch.int32),
        depths=torch.zeros(batch, n, dtype=torch.int32),
        visible=torch.zeros(batch, n, -(-n // 64), dtype=torch.int64),
        positions=torch.zeros(batch, n, dtype=torch.int64),
        log_probs=torch.full((batch, n), -np.inf, dtype=torch.float64),
        count=torch.zeros(batch, dtype=torch.int32),
    )
    for i in range(batch):
        logits = 2.0 * rng.normal(size=(depth, vocabulary))
        marginals = top_k_marginals(logits, min(budget, vocabulary))
        tree = build_tree(int(rng.integers(vocabulary)), *marginals, budget)
        m = len(tree)
        trees.tokens[i] = int(tree.tokens[0])
        for name in ("tokens", "parents", "depths", "log_probs"):
            getattr(trees, name)[i, :m] = torch.from_numpy(getattr(tree, name))
        trees.count[i] = m
    return trees


def edges(trees: DraftTrees) -> Iterator[tuple[int, int, int]]:
    """(request, node, its parent) of every node but the roots."""
    for request, node in np.argwhere(trees.parents.numpy() >= 0).tolist():
        yield request, node, int(trees.parents[request, node])


def assert_same_walk(
    path: torch.Tensor, path_len: torch.Tensor, bonus: torch.Tensor, expected: Accepted
) -> None:
    length = len(expected.path)
    assert int(path_len) == length
    assert path[:length].tolist() == expected.path.tolist()
    assert path[length:].tolist() == [-1] * (len(path) - length)
    assert int(bonus) == expected.bonus_token


def check_accept_greedy(
    operators: Operators, trees: DraftTrees, target_tokens: torch.Tensor, max_path: int
) -> list[int]:
    """Returns the path lengths, so that a test can ask for long and short ones."""
    out = operators.accept_greedy(trees.tokens, trees.parents, target_tokens, max_path)
    for i, n in enumerate(trees.count.tolist()):
        expected = accept_greedy(tree_of(trees, i), target_tokens[i, :n].numpy())
        assert_same_walk(out.path[i], out.path_len[i], out.bonus[i], expected)
    return [int(length) for length in out.path_len]


def check_accept_sampled(
    operators: Operators,
    trees: DraftTrees,
    logits: torch.Tensor,
    params: list[SamplingParams],
    uniforms: npt.NDArray[np.float64],
    every_node: bool,
) -> list[int]:
    """Every draw is the inverse CDF's for its uniform, but for rounding at a border between two
    tokens, and the walk follows the draws as ddtree does. Returns the path lengths."""
    out = operators.accept_sampled(
        trees, logits, sampling_tensors(params), torch.from_numpy(uniforms), every_node
    )
    for i in range(len(params)):
        tree = tree_of(trees, i)
        path = out.path[i, : int(out.path_len[i])].tolist()
        drawn = [*tree.tokens[path[1:]].tolist(), int(out.bonus[i])]
        for depth, (node, token) in enumerate(zip(path, drawn, strict=True)):
            row = logits[i, node].float().numpy()
            probs = target_distribution(row, as_float32(params[i]))
            upper = float(probs[: token + 1].sum())
            assert probs[token] > 0.0
            assert upper - probs[token] - BORDER <= uniforms[i, depth] <= upper + BORDER
        target_tokens = np.full(len(tree), -1)
        target_tokens[path] = drawn
        expected = accept_greedy(tree, target_tokens)
        assert_same_walk(out.path[i], out.path_len[i], out.bonus[i], expected)
    return [int(length) for length in out.path_len]


def check_draw_distribution(operators: Operators, params: SamplingParams, draws: int) -> None:
    """Chi-square of bonus tokens against the target's distribution; chance fails once in 1e5."""
    rng = np.random.default_rng(8)
    vocabulary, batch = 12, 200
    row = torch.from_numpy(1.5 * rng.normal(size=vocabulary)).float()
    expected = target_distribution(row.numpy(), as_float32(params)) * draws
    trees = draft_trees(rng, batch, depth=1, vocabulary=5, budget=1)
    trees.tokens[:, 1] = vocabulary  # a child that no draw takes
    logits = row.expand(batch, 2, -1).contiguous()
    counts = np.zeros(vocabulary)
    for _ in range(draws // batch):
        uniforms = torch.from_numpy(rng.random((batch, 2)))
        out = operators.accept_sampled(
            trees, logits, sampling_tensors([params] * batch), uniforms, every_node=False
        )
        counts += np.bincount(out.bonus.numpy(), minlength=vocabulary)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4.3 * np.sqrt(2.0 * freedom) + 12.0
