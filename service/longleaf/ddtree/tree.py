"""The draft tree: best-first search over the product of the drafter's per-depth marginals.

A DFlash drafter gives one distribution per depth, independent of the tokens above it, so the
probability of a prefix is the product of one entry per row. The tree is the set of `budget`
most probable prefixes (DDTree), found by a heap whose only moves are "next sibling" and
"first child".
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
import numpy.typing as npt

from longleaf.ddtree.ranking import rank_descending

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree; node 0 is the root, the bonus token of the step before (depth 0).

    tokens: int64[n], token of each node.
    parents: int32[n], parent node, -1 for the root; always parents[i] < i.
    depths: int32[n], depths[i] == depths[parents[i]] + 1.
    log_probs: float64[n], natural log of the drafter's probability of the prefix that ends in
        the node; the root's is 0.0.
    children: child node by (parent node, token), derived.

    The arrays are shared, not copied: treat them as read-only. Raises ValueError for arrays
    that form no such tree, two siblings with one token included.
    """

    tokens: IntArray
    parents: Int32Array
    depths: Int32Array
    log_probs: FloatArray
    children: dict[tuple[int, int], int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.tokens.size
        for name, array, dtype in (
            ("tokens", self.tokens, np.int64),
            ("parents", self.parents, np.int32),
            ("depths", self.depths, np.int32),
            ("log_probs", self.log_probs, np.float64),
        ):
            if array.dtype != dtype or array.shape != (n,):
                raise ValueError(
                    f"tree {name} must be {np.dtype(dtype)}[{n}], "
                    f"got {array.dtype}{list(array.shape)}"
                )
        if n == 0:
            raise ValueError("a tree has at least its root, got 0 nodes")
        tokens = self.tokens.tolist()
        parents = self.parents.tolist()
        depths = self.depths.tolist()
        if parents[0] != -1 or depths[0] != 0:
            raise ValueError(
                f"node 0 must be the root (parent -1, depth 0), "
                f"got parent {parents[0]}, depth {depths[0]}"
            )
        children: dict[tuple[int, int], int] = {}
        for node in range(1, n):
            parent = parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"parent of node {node} must be in [0, {node}), got {parent}")
            if depths[node] != depths[parent] + 1:
                raise ValueError(
                    f"depth of node {node} must be {depths[parent] + 1}, got {depths[node]}"
                )
            if children.setdefault((parent, tokens[node]), node) != node:
                raise ValueError(f"node {parent} has two children with token {tokens[node]}")
        object.__setattr__(self, "children", children)

    def __len__(self) -> int:
        """Return the node count, root included: the rows that the target verifies."""
        return self.tokens.size


def top_k_marginals(logits: npt.NDArray[np.floating], k: int) -> tuple[IntArray, FloatArray]:
    """Return the `k` most probable tokens of each depth and their log-probabilities.

    logits: [D, V], any float dtype, row d for depth d + 1; -inf marks an impossible token.
    Returns tokens int64[D, k] and log_probs float64[D, k], sorted by logit descending as the
    input's dtype compares them, equal logits by lower token id; log_probs are the float64
    log-softmax of the whole row. Raises ValueError for NaN, +inf or a row of -inf alone.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [D, V], got shape {list(logits.shape)}")
    depth, vocabulary = logits.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must be in [1, {vocabulary}] (the vocabulary), got {k}")
    tokens = np.empty((depth, k), dtype=np.int64)
    log_probs = np.empty((depth, k), dtype=np.float64)
    for d, row in enumerate(logits):
        peak = float(row.max())
        if not -inf < peak < inf:  # NaN fails too
            raise ValueError(f"logits of depth {d + 1} must have a finite maximum, got {peak}")
        shifted = row.astype(np.float64)
        shifted -= peak
        tokens[d] = rank_descending(row, k)
        log_probs[d] = shifted[tokens[d]] - np.log(np.exp(shifted).sum())
    return tokens, log_probs


def build_tree(
    root_token: int,
    tokens: npt.NDArray[np.integer],
    log_probs: npt.NDArray[np.floating],
    budget: int,
    seed_chain: bool = True,
) -> Tree:
    """Build the tree of the `budget` most probable prefixes under the drafter's marginals.

    tokens, log_probs: [D, K], row d holds the candidates of depth d + 1, sorted by log_probs
    descending (`top_k_marginals`); D is block - 1. A float32 input is widened exactly.
    Returns at most budget + 1 nodes, depth at most D; fewer when the candidates run out.

    Definition, for any implementation that must agree bit for bit:

    - score(root) = 0.0, score(child) = score(parent) + log_probs[depth - 1, rank]: one float64
      addition an edge, from the root down.
    - A candidate is a prefix not in the tree whose parent is. One whose score is -inf is never
      taken.
    - Seed (`seed_chain`): nodes 1..min(D, budget) are the chain of rank-0 tokens, cut before
      the first score of -inf. Without seed the tree starts as the root alone.
    - Then, until the budget is spent, the next node is the candidate with the smallest
      (-score, depth, parent node, rank). Ties are thus settled by the shallower candidate, then
      by the parent taken earlier, then by the lower rank. Node ids follow the order of taking.

    This key never puts a prefix before its parent or a sibling of lower rank, so the tree is
    ancestor-closed and, among ancestor-closed sets of that size (with seed: those that hold
    the chain), one of the greatest total probability, which is the expected accepted depth
    when the marginals are right. With the seed, greedy acceptance is never below the chain's.
    Time O(budget log budget) after O(D K) checks.

    Raises ValueError naming the argument: shapes that differ, a row not descending, a
    log-probability above 0 or NaN, a negative token, a token twice in one row, budget < 0.
    """
    rows, scores_by_rank = _checked_marginals(tokens, log_probs)
    if budget < 0:
        raise ValueError(f"budget must be at least 0, got {budget}")
    if root_token < 0:
        raise ValueError(f"root_token must be at least 0, got {root_token}")
    max_depth, width = tokens.shape
    node_tokens, parents, depths, scores = [root_token], [-1], [0], [0.0]
    heap: list[tuple[float, int, int, int]] = []  # (-score, depth, parent, rank)

    spine = min(max_depth, budget) if seed_chain else 0
    for d in range(spine):
        score = scores[d] + scores_by_rank[d][0]
        if score == -inf:
            break
        node_tokens.append(rows[d][0])
        parents.append(d)
        depths.append(d + 1)
        scores.append(score)
        if width > 1 and (sibling := scores[d] + scores_by_rank[d][1]) > -inf:
            heap.append((-sibling, d + 1, d, 1))
    last = len(scores) - 1
    if last < max_depth and (child := scores[last] + scores_by_rank[last][0]) > -inf:
        heap.append((-child, last + 1, last, 0))
    heapify(heap)

    while heap and len(scores) <= budget:
        negated, depth, parent, rank = heappop(heap)
        node = len(scores)
        node_tokens.append(rows[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-negated)
        if rank + 1 < width:
            sibling = scores[parent] + scores_by_rank[depth - 1][rank + 1]
            if sibling > -inf:
                heappush(heap, (-sibling, depth, parent, rank + 1))
        if depth < max_depth:
            child = scores_by_rank[depth][0] - negated
            if child > -inf:
                heappush(heap, (-child, depth + 1, node, 0))
    return Tree(
        np.array(node_tokens, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.array(scores, dtype=np.float64),
    )


def _checked_marginals(
    tokens: npt.NDArray[np.integer], log_probs: npt.NDArray[np.floating]
) -> tuple[list[list[int]], list[list[float]]]:
    """Return both arrays as lists, or raise ValueError as `build_tree` says."""
    if tokens.ndim != 2 or tokens.shape != log_probs.shape or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens and log_probs must have one shape [D, K], K >= 1, "
            f"got {list(tokens.shape)} and {list(log_probs.shape)}"
        )
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    # Written so that NaN fails.
    if not (log_probs[:, 0] <= 0.0).all():
        raise ValueError("log_probs must be at most 0")
    if not (log_probs[:, 1:] <= log_probs[:, :-1]).all():
        raise ValueError("log_probs must be sorted descending within each row")
    rows: list[list[int]] = tokens.tolist()
    for d, row in enumerate(rows):
        if len(set(row)) != len(row):
            raise ValueError(f"tokens of depth {d + 1} must be distinct")
        if min(row) < 0:
            raise ValueError(f"tokens of depth {d + 1} must be at least 0, got {min(row)}")
    scores: list[list[float]] = log_probs.tolist()
    return rows, scores
