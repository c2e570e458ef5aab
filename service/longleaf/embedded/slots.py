"""Ownership of KV pool slots: page size 1, every slot free, held by a request, or held by the
prefix cache.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


class SlotOwner(IntEnum):
    """Who holds a slot."""

    FREE = 0
    REQUEST = 1
    CACHE = 2


class SlotError(RuntimeError):
    """A slot was handed over by someone who does not hold it: the accounting is wrong."""


class SlotAllocator:
    """Hands out slot ids 0..capacity-1 and checks every hand-over.

    A slot id addresses one token's latent row of every target layer and the same token's draft K/V.
    Each change of owner names the owner that it expects; a mismatch (double release, leak into the
    cache) raises ``SlotError`` before anything has changed.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity}")
        self.capacity = capacity
        self._owner = np.full(capacity, SlotOwner.FREE, dtype=np.int8)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._seen = np.zeros(capacity, dtype=np.int64)
        self._num_free = capacity
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Slots that the prefix cache holds."""
        return self._num_cached

    @property
    def num_requests(self) -> int:
        """Slots that running requests hold for themselves."""
        return self.capacity - self._num_free - self._num_cached

    def allocate(self, count: int) -> Slots:
        """Take ``count`` free slots for a request: int64 [count]. ``SlotError`` when fewer are
        free.
        """
        if count > self._num_free:
            raise SlotError(f"{count} slots wanted, {self._num_free} free")
        slots = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._owner[slots] = SlotOwner.REQUEST
        return slots

    def release(self, slots: Slots) -> None:
        """A request gives back its slots."""
        self._give_back(slots, SlotOwner.REQUEST)

    def evict(self, slots: Slots) -> None:
        """The prefix cache gives back its slots. What is free is put in order: what lay beside each
        other in several requests comes together again.
        """
        self._give_back(slots, SlotOwner.CACHE)
        self._num_cached -= len(slots)
        self._free[: self._num_free][::-1].sort()

    def hand_to_cache(self, slots: Slots) -> None:
        """A request passes slots to the prefix cache."""
        self._check(slots, SlotOwner.REQUEST)
        self._owner[slots] = SlotOwner.CACHE
        self._num_cached += len(slots)

    def audit(self) -> dict[SlotOwner, int]:
        """Count owners slot by slot, and check them against the counters (``SlotError``)."""
        counts = np.bincount(self._owner, minlength=len(SlotOwner))
        found = {owner: int(counts[owner]) for owner in SlotOwner}
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free) or bool((self._owner[free] != SlotOwner.FREE).any()):
            raise SlotError("the free list names a slot twice or one that is held")
        if (found[SlotOwner.FREE], found[SlotOwner.CACHE]) != (self._num_free, self._num_cached):
            raise SlotError(f"counters disagree with owners: {found}")
        return found

    def _give_back(self, slots: Slots, owner: SlotOwner) -> None:
        self._check(slots, owner)
        self._owner[slots] = SlotOwner.FREE
        # Reversed, so that they come back in the same order: neighbours are read as one slice.
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    def _distinct(self, slots: Slots) -> bool:
        """Whether no slot is named twice, in linear time: a second one overwrites the first."""
        numbers = np.arange(len(slots))
        self._seen[slots] = numbers
        return bool((self._seen[slots] == numbers).all())

    def _check(self, slots: Slots, owner: SlotOwner) -> None:
        held = self._owner[slots]
        if bool((held != owner).any()) or not self._distinct(slots):
            raise SlotError(f"slots {slots.tolist()[:8]} are not all held by {owner.name}")
