"""Ancestor bits beyond one word, and the masks and positions made from them."""

import numpy as np
import pytest

from longleaf.ddtree import Tree, ancestor_bits, build_tree, dense_mask, positions


def random_tree(n: int, seed: int) -> Tree:
    """A tree of any shape: each node below a node before it."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(int(rng.integers(max(0, i - 9), i)) for i in range(1, n))], np.int32)
    depths = np.zeros(n, np.int32)
    for node in range(1, n):
        depths[node] = depths[parents[node]] + 1
    return Tree(np.arange(n, dtype=np.int64), parents, depths, np.zeros(n))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128, 129, 200])
def test_bits_are_the_closure_of_the_parents(n: int) -> None:
    tree = random_tree(n, n)
    bits = ancestor_bits(tree)
    assert bits.dtype == np.uint64
    assert bits.shape == (n, (n + 63) // 64)
    # Closure by repeated squaring of the parent relation, another way altogether.
    closure = np.eye(n, dtype=np.int64)
    for node in range(1, n):
        closure[node, tree.parents[node]] = 1
    for _ in range(n.bit_length() + 1):
        closure = np.minimum(closure @ closure, 1)
    for node in range(n):
        seen = {j for j in range(n) if int(bits[node, j // 64]) >> (j % 64) & 1}
        assert seen == set(np.flatnonzero(closure[node]).tolist())
        assert sum(int(word).bit_count() for word in bits[node]) == tree.depths[node] + 1
    assert dense_mask(bits, n).tolist() == closure.astype(bool).tolist()


def test_bits_by_hand() -> None:
    tokens = np.array([[7, 3], [8, 4]])
    tree = build_tree(1, tokens, np.log([[0.6, 0.4], [0.9, 0.1]]), 4)
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3]
    assert ancestor_bits(tree).tolist() == [[0b1], [0b11], [0b111], [0b1001], [0b11001]]
    assert positions(tree, 100).tolist() == [100, 101, 102, 101, 102]
    assert positions(tree, 100).dtype == np.int64


def test_wrong_inputs_are_refused() -> None:
    tree = random_tree(3, 0)
    with pytest.raises(ValueError, match=r"bits of 65 nodes must be uint64\[65, 2\]"):
        dense_mask(ancestor_bits(tree), 65)
    with pytest.raises(ValueError, match="prefix_len must be at least 0, got -1"):
        positions(tree, -1)
