"""Record, at every position of a greedy answer, what the widest draft tree would have accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longleaf.ddtree import Tree, build_tree, top_k_marginals
from longleaf.embedded.drafter import DraftAnchor
from longleaf.embedded.model_set import Models
from longleaf.embedded.target import Segment
from ops.bench.prompts import Prompt

NODES = 64
TOPK = 16
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """paths[p]: node ids of the path that the tree drafted at position p accepts, root left out.

    Trees of one draft are nested and ids follow the order of taking: the tree of w nodes accepts
    the ids below w.
    """

    name: str
    paths: tuple[tuple[int, ...], ...]


def record_trace(models: Models, prompt: Prompt, count: int) -> Trace:
    """Decode `count` tokens greedily, drafting the widest tree before each of them."""
    assert models.drafter is not None
    depth = models.drafter.config.block_size - 1
    tokens: list[int] = prompt.tokens.tolist()
    hidden = np.empty(0, dtype=np.float32)
    for start in range(0, len(tokens), _CHUNK):
        hidden = _forward(models, tokens[start : start + _CHUNK], start)
    tokens.append(int(models.target.logits(hidden).argmax()))
    trees: list[Tree] = []
    for position in range(len(prompt.tokens), len(prompt.tokens) + count + depth):
        slots = np.arange(position, dtype=np.int64)
        anchor = DraftAnchor(tokens[position], position, slots)
        logits = models.drafter.draft([anchor], models.pool).logits[0]
        trees.append(build_tree(tokens[position], *top_k_marginals(logits, TOPK), NODES - 1))
        hidden = _forward(models, [tokens[position]], position)
        tokens.append(int(models.target.logits(hidden).argmax()))
    begin = len(prompt.tokens) + 1
    paths = [_path(trees[n], tokens[begin + n :]) for n in range(count)]
    return Trace(prompt.name, tuple(paths))


def _forward(models: Models, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
    """Compute rows `start`, … of target and drafter; returns the last row's hidden [1, H]."""
    assert models.drafter is not None
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    prefix = np.arange(start, dtype=np.int64)
    segment = Segment(np.asarray(tokens, dtype=np.int64), positions, positions, prefix, None)
    output = models.target.forward([segment], models.pool)
    models.drafter.extend(output.features, positions, positions, models.pool)
    return output.hidden[-1:]


def _path(tree: Tree, following: Sequence[int]) -> tuple[int, ...]:
    path, node = [], 0
    for token in following:
        child = tree.children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return tuple(path)
