"""Which part of a prompt a replica has cached already, as far as a gateway can know.

The gateway sees bytes: a prompt is cut into blocks of its JSON text, from where its messages
begin. What was sent to a replica is taken to be in its cache until the cache must have dropped it,
or the replica was away.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.prefix_tree import PrefixTree

BLOCK_BYTES = 1024
_MOST_BLOCKS = 4096
"""What comes after so many is not looked at: hashing it would hold up the event loop."""
_TOOL_BYTES = 4096
"""Of the tools, which templates put before all messages: enough to tell one set from another."""
_BYTES_PER_TOKEN = 3
"""Few, so that a cache is taken for rather too small."""


@dataclass(slots=True)
class Prefix:
    """A prompt in blocks: each is a hash of its bytes and of all before them."""

    blocks: tuple[int, ...]
    size: int
    """Bytes of the whole prompt."""


def prefix_of(text: bytes, model: str, fields: Collection[str]) -> Prefix:
    """The blocks of a body's JSON ``text``; ``fields`` are the names that it has."""
    start = max(text.find(b'"messages"'), 0) or max(text.find(b'"prompt"'), 0)
    seed = hash(model)
    if "tools" in fields:
        tools = text.find(b'"tools"')
        end = tools + _TOOL_BYTES
        seed = hash((seed, text[tools : min(end, start) if tools < start else end]))
    blocks = []
    end = min(len(text), start + _MOST_BLOCKS * BLOCK_BYTES)
    for begin in range(start, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        seed = hash((seed, text[begin : begin + BLOCK_BYTES]))
        blocks.append(seed)
    return Prefix(tuple(blocks), max(1, len(text) - start))


class PrefixIndex:
    """A tree for each replica, started anew whenever the replica's cache may be lost."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._trees: WeakKeyDictionary[Replica, tuple[int, PrefixTree]] = WeakKeyDictionary()

    def share(self, replica: Replica, prefix: Prefix | None) -> float:
        """The part of a prompt that ``replica`` has cached, 0 to 1."""
        if prefix is None or not prefix.blocks:
            return 0.0
        tree = self._tree(replica)
        return 0.0 if tree is None else _part(tree, prefix)

    def shares(self, prefix: Prefix | None) -> Mapping[Replica, float]:
        """``share`` of every replica that has some of a prompt cached."""
        if prefix is None or not prefix.blocks:
            return {}
        first, found = prefix.blocks[0], {}
        for replica, (age, tree) in self._trees.items():
            if age == replica.cache_age and tree.begins(first):
                found[replica] = _part(tree, prefix)
        return found

    def placed(self, replica: Replica, prefix: Prefix | None) -> None:
        """A prompt goes to ``replica``."""
        if prefix is None or not prefix.blocks:
            return
        tree = self._tree(replica)
        if tree is None:
            tree = PrefixTree(self._max_bytes)
            self._trees[replica] = replica.cache_age, tree
        capacity = replica.budget.capacity
        most = None if capacity is None else capacity * _BYTES_PER_TOKEN // BLOCK_BYTES
        tree.insert(prefix.blocks, most)

    def _tree(self, replica: Replica) -> PrefixTree | None:
        age, tree = self._trees.get(replica, (-1, None))
        if tree is not None and age != replica.cache_age:
            del self._trees[replica]
            return None
        return tree


def _part(tree: PrefixTree, prefix: Prefix) -> float:
    """The part of a prompt that ``tree`` knows, 0 to 1."""
    return tree.match(prefix.blocks) * BLOCK_BYTES / prefix.size
