"""Radix tree over committed tokens: a request that shares a prefix reuses its KV slots (LRU, page
size 1).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from longleaf.embedded.slots import SlotAllocator, Slots

Tokens = NDArray[np.int64]
_NO_TOKENS = np.empty(0, dtype=np.int64)


@dataclass(eq=False, slots=True)
class CacheNode:
    """A run of tokens below its parent, with the slot of each token; ``locks`` counts requests that
    read it.
    """

    tokens: Tokens
    slots: Slots
    parent: "CacheNode | None"
    children: dict[int, "CacheNode"] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix: ``slots`` int64 [matched tokens] in order, ending at ``node``."""

    node: CacheNode
    slots: Slots


class PrefixCache:
    """Token-level radix tree whose nodes own their slots in the allocator.

    A match must be locked before the next eviction; locked nodes and their ancestors are never
    evicted. Namespaces keep apart tokens whose KV differ (a request without speculation has no
    draft K/V, a ``cache_salt`` isolates tenants).
    """

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[str, CacheNode] = {}
        self._clock = 0
        self._locked = 0

    @property
    def num_evictable(self) -> int:
        """Cached slots that no running request reads."""
        return self._allocator.num_cached - self._locked

    def match(self, tokens: Tokens, namespace: str = "") -> PrefixMatch:
        """Find the longest cached prefix of ``tokens`` int64 [T]; splits a node that matches in
        part.
        """
        self._clock += 1
        node = self._roots.get(namespace) or _new_root()
        found: list[Slots] = []
        start = 0
        while start < len(tokens):
            child = node.children.get(int(tokens[start]))
            if child is None:
                break
            same = _common_prefix(child.tokens, tokens[start:])
            node = child if same == len(child.tokens) else self._split(child, same)
            node.last_used = self._clock
            found.append(node.slots)
            start += same
        return PrefixMatch(node, np.concatenate(found) if found else _NO_TOKENS)

    def insert(self, tokens: Tokens, slots: Slots, namespace: str = "") -> int:
        """Take over the slots of ``tokens`` int64 [T] that are not cached yet.

        Returns the number of leading tokens that were cached already: their ``slots`` stay with the
        caller unless they are the cache's own (a prefix that the caller had matched).
        """
        self._roots.setdefault(namespace, _new_root())
        match = self.match(tokens, namespace)
        known = len(match.slots)
        if known < len(tokens):
            fresh = slots[known:].copy()
            self._allocator.hand_to_cache(fresh)
            leaf = CacheNode(tokens[known:].copy(), fresh, match.node, last_used=self._clock)
            match.node.children[int(tokens[known])] = leaf
        return known

    def lock(self, node: CacheNode) -> None:
        """Protect ``node`` and its ancestors from eviction until ``unlock``."""
        for step in _to_root(node):
            if step.locks == 0:
                self._locked += len(step.slots)
            step.locks += 1

    def unlock(self, node: CacheNode) -> None:
        """Undo one ``lock``."""
        for step in _to_root(node):
            if step.locks == 0:
                raise RuntimeError("prefix cache node unlocked more often than locked")
            step.locks -= 1
            if step.locks == 0:
                self._locked -= len(step.slots)

    def evict(self, count: int) -> int:
        """Free up to ``count`` slots, least recently used leaves first, from their ends; returns
        how many.
        """
        heap = [(leaf.last_used, id(leaf), leaf) for leaf in self._leaves()]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < count:
            leaf = heapq.heappop(heap)[2]
            parent = leaf.parent
            assert parent is not None
            keep = max(0, len(leaf.slots) - (count - freed))
            self._allocator.evict(leaf.slots[keep:])
            freed += len(leaf.slots) - keep
            if keep:
                leaf.tokens, leaf.slots = leaf.tokens[:keep].copy(), leaf.slots[:keep].copy()
                continue
            del parent.children[int(leaf.tokens[0])]
            if parent.parent is not None and not parent.children and parent.locks == 0:
                heapq.heappush(heap, (parent.last_used, id(parent), parent))
        self._roots = {name: root for name, root in self._roots.items() if root.children}
        return freed

    def clear(self) -> int:
        """Evict everything that no request reads; returns the slots freed."""
        return self.evict(self._allocator.capacity)

    def _split(self, node: CacheNode, at: int) -> CacheNode:
        parent = node.parent
        assert parent is not None
        head = CacheNode(
            node.tokens[:at], node.slots[:at], parent, locks=node.locks, last_used=node.last_used
        )
        head.children[int(node.tokens[at])] = node
        parent.children[int(head.tokens[0])] = head
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], head
        return head

    def _leaves(self) -> Iterator[CacheNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.locks == 0:
                yield node


def _new_root() -> CacheNode:
    return CacheNode(_NO_TOKENS, _NO_TOKENS, None)


def _common_prefix(left: Tokens, right: Tokens) -> int:
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length


def _to_root(node: CacheNode) -> Iterator[CacheNode]:
    step: CacheNode | None = node
    while step is not None and step.parent is not None:
        yield step
        step = step.parent
