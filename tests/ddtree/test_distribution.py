"""The sampled walk's texts against the target's distribution over texts, by chi-square.

Biased walks that look right at a glance must fail the same test at the same sample size.
"""

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from longleaf.ddtree import (
    SamplingParams,
    Tree,
    accept_sampled,
    committed_tokens,
    draw,
    target_distribution,
)
from tests.ddtree.toy import ToyModel

VOCABULARY, TEXT, DEPTH, WALKS = 4, 3, 3, 6_000
PROMPT = [1, 2]
Floats = npt.NDArray[np.float64]
Walk = Callable[[Tree, npt.NDArray[np.float32], SamplingParams, np.random.Generator], list[int]]


def exact_walk(
    tree: Tree, logits: npt.NDArray[np.float32], params: SamplingParams, rng: np.random.Generator
) -> list[int]:
    return committed_tokens(tree, accept_sampled(tree, logits, params, rng.random(DEPTH + 1)))


def second_chance_walk(
    tree: Tree, logits: npt.NDArray[np.float32], params: SamplingParams, rng: np.random.Generator
) -> list[int]:
    """Biased towards drafted tokens: a draw that no child carries is drawn again for the bonus."""
    node = 0
    text: list[int] = []
    while True:
        probs = target_distribution(logits[node], params)
        child = tree.children.get((node, draw(probs, rng.random())))
        if child is None:
            return [*text, draw(probs, rng.random())]
        node = child
        text.append(int(tree.tokens[node]))


def faint_second_chance_walk(
    tree: Tree, logits: npt.NDArray[np.float32], params: SamplingParams, rng: np.random.Generator
) -> list[int]:
    """Biased in every other step."""
    walk = second_chance_walk if rng.random() < 0.5 else exact_walk
    return walk(tree, logits, params, rng)


def one_uniform_walk(
    tree: Tree, logits: npt.NDArray[np.float32], params: SamplingParams, rng: np.random.Generator
) -> list[int]:
    """Right at every single position, wrong over texts: one uniform serves all depths."""
    uniforms = np.full(DEPTH + 1, rng.random())
    return committed_tokens(tree, accept_sampled(tree, logits, params, uniforms))


def p_value(walk: Walk, params: SamplingParams, budget: int, seed_chain: bool) -> float:
    """Chi-square p-value of WALKS texts of TEXT tokens, each over as many steps as it takes."""
    model = ToyModel.random(VOCABULARY, DEPTH, noise=1.0, seed=3)
    rng = np.random.default_rng(17)
    steps: dict[tuple[int, int], tuple[Tree, npt.NDArray[np.float32]]] = {}
    for before, last in product(range(VOCABULARY), repeat=2):
        tree = model.draft([before, last], 3, budget, seed_chain)
        steps[before, last] = tree, model.verify([before, last], tree)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(WALKS):
        context = list(PROMPT)
        while len(context) < len(PROMPT) + TEXT:
            tree, logits = steps[context[-2], context[-1]]
            context += walk(tree, logits, params, rng)
        counts[tuple(context[len(PROMPT) : len(PROMPT) + TEXT])] += 1

    observed, expected = [], []
    rare_observed, rare_expected = 0, 0.0
    for text in product(range(VOCABULARY), repeat=TEXT):
        mass = text_probability(model, text, params) * WALKS
        if mass == 0.0:
            assert counts[text] == 0, f"a text of probability zero came out: {text}"
        elif mass < 5.0:  # chi-square wants cells of some size: pool the rare texts
            rare_observed += counts[text]
            rare_expected += mass
        else:
            observed.append(counts[text])
            expected.append(mass)
    if rare_expected > 0.0:
        observed.append(rare_observed)
        expected.append(rare_expected)
    assert len(observed) > 10
    return float(chisquare(observed, expected).pvalue)


def text_probability(model: ToyModel, text: tuple[int, ...], params: SamplingParams) -> float:
    context, mass = list(PROMPT), 1.0
    for token in text:
        mass *= float(target_distribution(model.logits(context), params)[token])
        context.append(token)
    return mass


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.6),
    SamplingParams(temperature=2.5, top_p=0.9),
    SamplingParams(temperature=3.0, top_k=3),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.97, min_p=0.05),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(("budget", "seed_chain"), [(6, True), (2, False)])
def test_sampled_walk_has_the_target_distribution(
    params: SamplingParams, budget: int, seed_chain: bool
) -> None:
    assert p_value(exact_walk, params, budget, seed_chain) > 1e-3


@pytest.mark.parametrize("walk", [second_chance_walk, faint_second_chance_walk, one_uniform_walk])
@pytest.mark.parametrize("params", PARAMS[::2], ids=str)
def test_a_biased_walk_is_rejected(walk: Walk, params: SamplingParams) -> None:
    assert p_value(walk, params, budget=6, seed_chain=True) < 1e-6
