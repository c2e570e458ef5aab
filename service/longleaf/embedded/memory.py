"""What a request holds of the KV pool: slots of its own, and a locked prefix of the cache."""

import numpy as np

from longleaf.embedded.prefix_cache import CacheNode, PrefixCache, Tokens
from longleaf.embedded.slots import SlotAllocator, Slots


class KvMemory:
    """The allocator and the prefix cache as one: what the cache holds gives way when a request
    needs room.
    """

    def __init__(self, capacity: int, evict_at_least: int = 1) -> None:
        """``evict_at_least``: slots that the cache gives way by, where one does not want to ask it
        for a few every step.
        """
        self.slots = SlotAllocator(capacity)
        self.cache = PrefixCache(self.slots)
        self._evict_at_least = evict_at_least

    @property
    def available(self) -> int:
        """Slots that a request can have now: free, or cached and not being read."""
        return self.slots.num_free + self.cache.num_evictable

    @property
    def used(self) -> int:
        """Slots that running requests hold or read."""
        return self.slots.capacity - self.available

    def allocate(self, count: int) -> Slots:
        """Take ``count`` slots, evicting cached ones when free ones run short; ``SlotError`` above
        ``available``.
        """
        missing = count - self.slots.num_free
        if missing > 0:
            self.cache.evict(max(missing, self._evict_at_least))
        return self.slots.allocate(count)

    def release(self, slots: Slots) -> None:
        """Give back slots that a request holds."""
        self.slots.release(slots)


class KvLease:
    """One request's committed rows in the pool, in token order.

    The first ``shared`` rows belong to the prefix cache (locked while the lease lives), the others
    to the request.
    """

    def __init__(self, memory: KvMemory, tokens: Tokens, reuse: int, namespace: str) -> None:
        """Lock the cached prefix of ``tokens[:reuse]`` int64; takes no slots yet."""
        self._memory = memory
        self._namespace = namespace
        match = memory.cache.match(tokens[:reuse], namespace)
        memory.cache.lock(match.node)
        self._node: CacheNode = match.node
        self._rows: Slots = np.empty(max(64, 2 * len(tokens)), dtype=np.int64)
        self._rows[: len(match.slots)] = match.slots
        self._length = self._shared = len(match.slots)

    @property
    def length(self) -> int:
        """Rows held, shared ones included."""
        return self._length

    @property
    def shared(self) -> int:
        """Rows that the prefix cache owns."""
        return self._shared

    @property
    def slots(self) -> Slots:
        """Slot of every row: int64 [length], a view."""
        return self._rows[: self._length]

    def append(self, slots: Slots) -> None:
        """Take over ``slots`` int64 [k] that were allocated for the next k tokens."""
        end = self._length + len(slots)
        if end > len(self._rows):
            self._rows = np.concatenate([self.slots, np.empty(end, dtype=np.int64)])
        self._rows[self._length : end] = slots
        self._length = end

    def publish(self, tokens: Tokens) -> None:
        """Put the rows of ``tokens`` int64 [t <= length], all computed, into the cache for others
        to reuse.

        Rows that another request has put there meanwhile replace this request's own copies.
        """
        cache = self._memory.cache
        count = len(tokens)
        if count == self._shared:
            return
        known = cache.insert(tokens, self._rows[:count], self._namespace)
        match = cache.match(tokens, self._namespace)
        cache.lock(match.node)
        cache.unlock(self._node)
        if known > self._shared:
            self._memory.release(self._rows[self._shared : known].copy())
        self._node = match.node
        self._rows[:count] = match.slots
        self._shared = count

    def close(self) -> None:
        """Release the request's own rows and stop reading the cache."""
        own = self._rows[self._shared : self._length].copy()
        self._length = self._shared
        self._memory.release(own)
        self._memory.cache.unlock(self._node)
