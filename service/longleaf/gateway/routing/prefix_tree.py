"""A radix tree over the blocks of prompts: what a replica's prefix cache should still hold.

A block stands for some bytes of a prompt and, by its hash, for all before them. Edges hold runs of
blocks, so that a long conversation is one node until another branches off.
"""

from collections import OrderedDict
from collections.abc import Sequence

_NODE_BYTES = 500
_BLOCK_BYTES = 40


class _Node:
    __slots__ = ("blocks", "children", "parent")

    def __init__(self, blocks: tuple[int, ...], parent: "_Node | None") -> None:
        self.blocks = blocks
        self.parent = parent
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """Blocks seen, the least recently used ones forgotten above ``max_bytes`` of memory.

    Invariants: a node is as recent as its most recent child, so the oldest one is a leaf;
    ``blocks`` and ``bytes`` are sums over the nodes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._root = _Node((), None)
        self._by_age: OrderedDict[_Node, None] = OrderedDict()
        self.blocks = 0

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return _NODE_BYTES * len(self._by_age) + _BLOCK_BYTES * self.blocks

    def begins(self, block: int) -> bool:
        """Whether a prompt that is known begins with ``block``."""
        return block in self._root.children

    def match(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks``, from the first on, are known."""
        node, found = self._root, 0
        while found < len(blocks):
            child = node.children.get(blocks[found])
            if child is None:
                break
            same = _common(child.blocks, blocks, found)
            found += same
            if same < len(child.blocks):
                break
            node = child
        return found

    def insert(self, blocks: Sequence[int], max_blocks: int | None = None) -> None:
        """Note that a prompt of ``blocks`` was seen. ``max_blocks``: what the cache can hold."""
        node, found = self._root, 0
        path: list[_Node] = []
        while found < len(blocks):
            child = node.children.get(blocks[found])
            if child is None:
                child = _Node(tuple(blocks[found:]), node)
                node.children[blocks[found]] = child
                self.blocks += len(child.blocks)
            same = _common(child.blocks, blocks, found)
            if same < len(child.blocks):
                child = self._split(child, same)
            found += same
            path.append(child)
            node = child
        for seen in reversed(path):
            self._by_age[seen] = None
            self._by_age.move_to_end(seen)
        self._forget(max_blocks)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut ``node`` in two; returns the upper part, which takes its place."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.blocks[:at], parent)
        parent.children[upper.blocks[0]] = upper
        node.blocks, node.parent = node.blocks[at:], upper
        upper.children[node.blocks[0]] = node
        return upper

    def _forget(self, max_blocks: int | None) -> None:
        while self._by_age and (
            self.bytes > self._max_bytes or (max_blocks is not None and self.blocks > max_blocks)
        ):
            oldest, _ = self._by_age.popitem(last=False)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.blocks[0]]
            self.blocks -= len(oldest.blocks)


def _common(own: tuple[int, ...], blocks: Sequence[int], start: int) -> int:
    """Length of the common run. Once two hashes differ, all behind them do."""
    length = min(len(own), len(blocks) - start)
    if own[length - 1] == blocks[start + length - 1]:
        return length
    low, high = 0, length - 1  # own[:low] is common, own[high] is not
    while low < high:
        middle = (low + high) // 2
        if own[middle] == blocks[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
