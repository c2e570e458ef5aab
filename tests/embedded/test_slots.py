"""Slots never leak, never have two owners, and are handed out in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longleaf.embedded.slots import SlotAllocator, SlotError, SlotOwner

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "release", "cache", "evict"]), st.integers(min_value=0)),
    max_size=60,
)


@given(capacity=st.integers(1, 24), operations=OPERATIONS)
def test_every_slot_has_one_owner(capacity: int, operations: list[tuple[str, int]]) -> None:
    allocator = SlotAllocator(capacity)
    held: list[int] = []
    cached: list[int] = []
    for name, number in operations:
        if name == "allocate":
            count = number % (capacity - len(held) - len(cached) + 1)
            slots = allocator.allocate(count).tolist()
            assert not set(slots) & (set(held) | set(cached))
            held += slots
            continue
        source = cached if name == "evict" else held
        count = number % (len(source) + 1)
        taken, source[:] = source[:count], source[count:]
        slots = np.array(taken, dtype=np.int64)
        if name == "release":
            allocator.release(slots)
        elif name == "cache":
            allocator.hand_to_cache(slots)
            cached += taken
        else:
            allocator.evict(slots)
        assert allocator.audit() == {
            SlotOwner.FREE: capacity - len(held) - len(cached),
            SlotOwner.REQUEST: len(held),
            SlotOwner.CACHE: len(cached),
        }
        assert allocator.num_free + allocator.num_requests + allocator.num_cached == capacity


def test_neighbouring_slots_come_together_again_after_a_step() -> None:
    allocator = SlotAllocator(32)
    first = allocator.allocate(9)
    assert first.tolist() == list(range(9))
    allocator.release(first[4:])
    assert allocator.allocate(9).tolist() == list(range(4, 13))


def test_more_than_there_is() -> None:
    allocator = SlotAllocator(4)
    allocator.allocate(3)
    with pytest.raises(SlotError, match="2 slots wanted, 1 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_wrong_hand_overs_change_nothing() -> None:
    allocator = SlotAllocator(8)
    mine = allocator.allocate(4)
    allocator.hand_to_cache(mine[:2])
    for operation, slots in (
        (allocator.release, mine),
        (allocator.release, np.array([2, 2])),
        (allocator.evict, mine),
        (allocator.hand_to_cache, mine),
        (allocator.release, np.array([7])),
    ):
        with pytest.raises(SlotError, match="not all held by"):
            operation(slots)
        assert allocator.audit() == {SlotOwner.FREE: 4, SlotOwner.REQUEST: 2, SlotOwner.CACHE: 2}


def test_audit_finds_planted_corruption() -> None:
    allocator = SlotAllocator(8)
    allocator.allocate(4)
    allocator._owner[6] = SlotOwner.REQUEST
    with pytest.raises(SlotError, match="free list"):
        allocator.audit()
    allocator = SlotAllocator(8)
    allocator.allocate(4)
    allocator._owner[1] = SlotOwner.CACHE
    with pytest.raises(SlotError, match="counters disagree"):
        allocator.audit()


def test_capacity_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        SlotAllocator(0)
