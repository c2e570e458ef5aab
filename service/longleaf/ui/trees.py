"""Draft trees as engines tell them, and their drawing."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_COLUMN, _ROW, _MARGIN, _RADIUS = 62.0, 20.0, 16.0, 5.0
MOST_NODES = 512
MOST_TREES = 64
_MOST_TEXT = 40
_SPACE = "\N{MIDDLE DOT}"


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One verified tree. Node 0 is the root; ``parents[i] < i``.

    probabilities: the drafter's, of the prefix that ends in the node. path: the accepted nodes,
    root first; the step committed as many tokens (its last one is the bonus token). texts: of the
    nodes' tokens, where the engine shows them. context: tokens before the tree. time: Unix seconds.
    """

    time: float
    context: int
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    path: tuple[int, ...]
    texts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what is no tree, or a path that is not one of it."""
        nodes = len(self.parents)
        if not 0 < nodes <= MOST_NODES or len(self.probabilities) != nodes:
            raise ValueError(f"a tree has 1 to {MOST_NODES} nodes and a probability of each")
        if not all(map(math.isfinite, (self.time, *self.probabilities))):
            raise ValueError("times and probabilities are numbers")
        if self.parents[0] != -1 or any(
            not 0 <= parent < node for node, parent in enumerate(self.parents[1:], 1)
        ):
            raise ValueError("the parent of each node but the root must come before it")
        if self.texts is not None and len(self.texts) != nodes:
            raise ValueError("each node has a text, or none has")
        if not self.path or self.path[0] != 0 or any(not 0 <= one < nodes for one in self.path):
            raise ValueError("an accepted path begins at the root and stays in the tree")
        steps = zip(self.path, self.path[1:], strict=False)
        if any(self.parents[node] != before for before, node in steps):
            raise ValueError("each accepted node must be a child of the one before")

    @property
    def commit_len(self) -> int:
        """Tokens that the step committed."""
        return len(self.path)


def read_trees(text: bytes, most: int = MOST_TREES) -> list[DraftTree]:
    """The last ``most`` of an engine's answer, oldest first; ``ValueError`` says what is wrong
    with it.
    """
    answer = json.loads(text)
    found = answer.get("trees") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise ValueError("no list 'trees'")
    return [_read_tree(one) for one in found[-most:]]


def _read_tree(found: Any) -> DraftTree:
    try:
        texts = found.get("texts")
        return DraftTree(
            time=float(found["time"]),
            context=int(found["context"]),
            parents=tuple(map(int, found["parents"])),
            probabilities=tuple(math.exp(min(float(one), 0.0)) for one in found["log_probs"]),
            path=tuple(map(int, found["path"])),
            texts=None if texts is None else tuple(_shortened(str(text)) for text in texts),
        )
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"a tree lacks or mistypes a field: {error}") from error


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}\N{HORIZONTAL ELLIPSIS}"


def layout(parents: Sequence[int]) -> list[tuple[int, float]]:
    """Depth and row of each node: leaves get a row each, in depth-first order, and a parent is in
    the middle of its children.
    """
    children: dict[int, list[int]] = {}
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        children.setdefault(parents[node], []).append(node)
        depths[node] = depths[parents[node]] + 1
    rows = [0.0] * len(parents)
    leaf = 0
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children.get(node, ())))
    for node in order:
        if node not in children:
            rows[node] = float(leaf)
            leaf += 1
    for node in reversed(order):
        if below := children.get(node):
            rows[node] = (rows[below[0]] + rows[below[-1]]) / 2
    return list(zip(depths, rows, strict=True))


def draw(tree: DraftTree) -> str:
    """An SVG element: accepted nodes and edges have the class ``accepted``."""
    places = layout(tree.parents)
    points = [(_MARGIN + x * _COLUMN, _MARGIN + y * _ROW) for x, y in places]
    width = 2 * _MARGIN + max(x for x, _ in points) + _COLUMN
    height = _MARGIN + max(y for _, y in points)
    accepted = set(tree.path)
    parts = [
        f'<svg class="tree" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" aria-label="{_described(tree)}">'
    ]
    for node in (*(n for n in range(1, len(points)) if n not in accepted), *tree.path[1:]):
        (x1, y1), (x2, y2) = points[tree.parents[node]], points[node]
        middle = (x1 + x2) / 2
        parts.append(
            f'<path class="{_class("edge", node in accepted)}" '
            f'd="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} '
            f'{x2:.1f} {y2:.1f}"/>'
        )
    for node, (x, y) in enumerate(points):
        share = tree.probabilities[node]
        if tree.texts:
            label = tree.texts[node].replace(" ", _SPACE)
        else:
            label = "" if node == 0 else f"{share:.2f}".lstrip("0")
        parts.append(
            f'<circle class="{_class("node", node in accepted)}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{_RADIUS}"><title>{html.escape(_title(tree, node))}</title></circle>'
            f'<text x="{x + 6:.1f}" y="{y - 4:.1f}">{html.escape(label)}</text>'
        )
    return "".join((*parts, "</svg>"))


def _class(name: str, accepted: bool) -> str:
    return f"{name} accepted" if accepted else name


def _title(tree: DraftTree, node: int) -> str:
    if node == 0:
        return "root: the token that the step before gave"
    said = f"{tree.texts[node]!r}, " if tree.texts else ""
    end = ", accepted" if node in tree.path else ""
    return f"{said}prefix probability {tree.probabilities[node]:.3g}{end}"


def _described(tree: DraftTree) -> str:
    return f"draft tree of {len(tree.parents)} nodes, {len(tree.path) - 1} drafts accepted"
