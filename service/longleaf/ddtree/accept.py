"""Accept: walk the verified tree from the root along the target's own choices."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longleaf.ddtree.sampling import SamplingParams, draw, target_distribution
from longleaf.ddtree.tree import Tree


@dataclass(frozen=True, eq=False)
class Accepted:
    """What the walk accepted.

    path: int32[m], node ids from the root (node 0) down, ascending; m >= 1.
    bonus_token: the target's token after the last accepted node; the next step's root.
    depth: depth of the last accepted node as the tree records it.
    """

    path: npt.NDArray[np.int32]
    bonus_token: int
    depth: int


def accept_greedy(tree: Tree, argmax_tokens: npt.NDArray[np.integer]) -> Accepted:
    """Accept the longest path on which each node's child is the target's argmax there.

    argmax_tokens: [n], the target's most probable token after each node.
    """
    if argmax_tokens.shape != (len(tree),):
        raise ValueError(
            f"argmax_tokens must be [{len(tree)}], got shape {list(argmax_tokens.shape)}"
        )
    return _walk(tree, lambda node, depth: int(argmax_tokens[node]))


def accept_sampled(
    tree: Tree,
    logits: npt.NDArray[np.floating],
    params: SamplingParams,
    uniforms: npt.NDArray[np.float64],
) -> Accepted:
    """Accept by drawing the target's own token at each node, going down iff a child carries it.

    logits: [n, V] of the target after each node. uniforms: [at least tree depth + 1], in
    [0, 1], independent; uniforms[d] draws the token after the node of depth d.
    Every committed token is a draw from the target's distribution given the tokens before it,
    whatever the tree holds, so the output distribution is the target's exactly; and a request
    whose uniforms belong to positions gets the tokens it would get without speculation.
    Distributions are computed only at nodes that the walk visits.
    """
    if logits.ndim != 2 or logits.shape[0] != len(tree):
        raise ValueError(f"logits must be [{len(tree)}, V], got shape {list(logits.shape)}")
    needed = int(tree.depths.max()) + 1
    if uniforms.ndim != 1 or uniforms.size < needed:
        raise ValueError(f"uniforms must be [{needed}] or longer, got shape {list(uniforms.shape)}")
    return _walk(
        tree,
        lambda node, depth: draw(target_distribution(logits[node], params), float(uniforms[depth])),
    )


def shorten(tree: Tree, accepted: Accepted, commit_len: int) -> Accepted:
    """Return the walk cut to its first `commit_len` tokens, as for a stop token or a limit.

    The token at the cut becomes the bonus token, so path, depth and committed tokens agree.
    commit_len must be in [1, committed tokens]; at the upper end nothing changes.
    """
    full = len(accepted.path)
    if not 1 <= commit_len <= full:
        raise ValueError(f"commit_len must be in [1, {full}], got {commit_len}")
    if commit_len == full:
        return accepted
    path = accepted.path[:commit_len]
    bonus = int(tree.tokens[accepted.path[commit_len]])
    return Accepted(path, bonus, int(tree.depths[path[-1]]))


def committed_tokens(tree: Tree, accepted: Accepted) -> list[int]:
    """Return the tokens that the step commits: the accepted drafts, then the bonus token."""
    tokens: list[int] = tree.tokens[accepted.path[1:]].tolist()
    return [*tokens, accepted.bonus_token]


def _walk(tree: Tree, choose: Callable[[int, int], int]) -> Accepted:
    """Follow choose(node, depth), the target's token after a node, until no child has it."""
    path = [0]
    while True:
        token = choose(path[-1], len(path) - 1)
        child = tree.children.get((path[-1], token))
        if child is None:
            return Accepted(np.array(path, dtype=np.int32), token, int(tree.depths[path[-1]]))
        path.append(child)
