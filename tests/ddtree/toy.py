"""Toy autoregressive targets and drafters over a handful of tokens, for the tests of this room."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longleaf.ddtree import Tree, build_tree, top_k_marginals

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ToyModel:
    """Target logits depend on the last two tokens; the drafter sees them through noise.

    table: float32[V, V, V], logits after (last but one, last).
    noise: float32[V, V, D, V], what the drafter adds, by its context and depth.
    """

    table: npt.NDArray[np.float32]
    noise: npt.NDArray[np.float32]

    @classmethod
    def random(cls, vocabulary: int, depth: int, noise: float, seed: int) -> "ToyModel":
        rng = np.random.default_rng(seed)
        shape = (vocabulary, vocabulary)
        return cls(
            (2.0 * rng.normal(size=(*shape, vocabulary))).astype(np.float32),
            (noise * rng.normal(size=(*shape, depth, vocabulary))).astype(np.float32),
        )

    def logits(self, context: list[int]) -> npt.NDArray[np.float32]:
        row: npt.NDArray[np.float32] = self.table[context[-2], context[-1]]
        return row

    def draft_logits(self, context: list[int]) -> npt.NDArray[np.float32]:
        """Logits [D, V] of a block drafter: row d follows its own greedy guess of the d before."""
        noise = self.noise[context[-2], context[-1]]
        guess, rows = list(context), []
        for extra in noise:
            rows.append(self.logits(guess) + extra)
            guess.append(int(rows[-1].argmax()))
        return np.stack(rows)

    def draft(self, context: list[int], k: int, budget: int, seed_chain: bool = True) -> Tree:
        """Build the tree whose root is the context's last token."""
        tokens, log_probs = top_k_marginals(self.draft_logits(context), k)
        return build_tree(context[-1], tokens, log_probs, budget, seed_chain)

    def verify(self, context: list[int], tree: Tree) -> npt.NDArray[np.float32]:
        """Target logits [n, V] after each node, each from its own ancestors alone."""
        return np.stack(
            [self.logits(context[:-1] + path_tokens(tree, node)) for node in range(len(tree))]
        )


def path_tokens(tree: Tree, node: int) -> list[int]:
    """Tokens from the root to the node."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens[::-1]


def prefixes(tree: Tree) -> set[tuple[int, ...]]:
    """Every drafted prefix of the tree, without the root's token."""
    return {tuple(path_tokens(tree, node)[1:]) for node in range(1, len(tree))}


def random_marginals(
    rng: np.random.Generator, depth: int, width: int, scale: float = 2.0
) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Sorted marginals over a vocabulary of exactly `width` tokens."""
    return top_k_marginals(scale * rng.normal(size=(depth, width)), width)
