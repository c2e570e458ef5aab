"""The radix tree finds the longest shared prefix and never evicts what is being read."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from longleaf.embedded.memory import KvLease, KvMemory
from longleaf.embedded.prefix_cache import PrefixCache
from longleaf.embedded.slots import SlotAllocator

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=12)


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def put(
    cache: PrefixCache, allocator: SlotAllocator, tokens: list[int], name: str = ""
) -> list[int]:
    """Insert ``tokens`` as a finished request would; returns the slots that it had used."""
    slots = allocator.allocate(len(tokens))
    known = cache.insert(np.array(tokens, dtype=np.int64), slots, name)
    allocator.release(slots[:known])
    return [int(slot) for slot in slots]


@given(stored=SEQUENCES, wanted=SEQUENCES)
def test_match_is_the_longest_stored_prefix(
    stored: list[list[int]], wanted: list[list[int]]
) -> None:
    allocator = SlotAllocator(256)
    cache = PrefixCache(allocator)
    slot_of: dict[tuple[int, ...], int] = {}
    for tokens in stored:
        slots = put(cache, allocator, tokens)
        for end in range(1, len(tokens) + 1):
            slot_of.setdefault(tuple(tokens[:end]), slots[end - 1])
    assert allocator.num_cached == cache.num_evictable == len(slot_of)
    for tokens in wanted:
        prefixes = [tuple(tokens[:end]) for end in range(1, len(tokens) + 1)]
        expected = [slot_of[prefix] for prefix in prefixes if prefix in slot_of]
        assert cache.match(np.array(tokens, dtype=np.int64)).slots.tolist() == expected
    allocator.audit()


@given(stored=SEQUENCES, count=st.integers(0, 130))
def test_eviction_frees_what_is_asked_and_keeps_prefixes(
    stored: list[list[int]], count: int
) -> None:
    allocator = SlotAllocator(256)
    cache = PrefixCache(allocator)
    for tokens in stored:
        put(cache, allocator, tokens)
    before = allocator.num_cached
    assert cache.evict(count) == min(count, before)
    assert allocator.num_cached == before - min(count, before)
    allocator.audit()
    # What is left can still be matched: every remaining slot hangs on an unbroken path.
    reachable = {
        slot
        for tokens in stored
        for slot in cache.match(np.array(tokens, dtype=np.int64)).slots.tolist()
    }
    assert len(reachable) == allocator.num_cached


def test_least_recently_used_goes_first() -> None:
    allocator = SlotAllocator(16)
    cache = PrefixCache(allocator)
    for start in (1, 5, 9):
        put(cache, allocator, [start, start + 1, start + 2])
    cache.match(ids(1, 2, 3))
    cache.evict(3)
    assert [len(cache.match(ids(s, s + 1, s + 2)).slots) for s in (1, 5, 9)] == [3, 0, 3]


def test_what_is_read_is_never_evicted() -> None:
    allocator = SlotAllocator(16)
    cache = PrefixCache(allocator)
    put(cache, allocator, [1, 2, 3, 4])
    put(cache, allocator, [1, 2, 8, 9])
    match = cache.match(ids(1, 2, 3))
    cache.lock(match.node)
    assert cache.num_evictable == 3
    assert cache.evict(100) == 3
    assert cache.match(ids(1, 2, 3, 4)).slots.tolist() == match.slots.tolist()
    cache.unlock(match.node)
    assert cache.evict(100) == 3
    assert allocator.num_free == 16
    with pytest.raises(RuntimeError, match="unlocked more often than locked"):
        cache.unlock(match.node)


def test_a_split_keeps_locks() -> None:
    allocator = SlotAllocator(16)
    cache = PrefixCache(allocator)
    put(cache, allocator, [1, 2, 3, 4])
    whole = cache.match(ids(1, 2, 3, 4))
    cache.lock(whole.node)
    part = cache.match(ids(1, 2))
    cache.lock(part.node)
    cache.unlock(whole.node)
    assert cache.num_evictable == 2
    assert cache.evict(100) == 2
    cache.unlock(part.node)
    assert cache.num_evictable == 2


def test_namespaces_do_not_share() -> None:
    allocator = SlotAllocator(16)
    cache = PrefixCache(allocator)
    put(cache, allocator, [1, 2, 3], "a")
    assert len(cache.match(ids(1, 2, 3), "b").slots) == 0
    assert len(cache.match(ids(1, 2, 3), "a").slots) == 3
    cache.clear()
    assert cache._roots == {}


def test_a_lease_replaces_its_copies_by_the_cached_rows() -> None:
    memory = KvMemory(32)
    tokens = ids(1, 2, 3, 4, 5)
    leases = [KvLease(memory, tokens, 4, "") for _ in range(2)]
    for lease in leases:
        assert lease.length == 0
        lease.append(memory.allocate(5))
    first, second = leases
    first.publish(tokens)
    second.publish(tokens)
    assert second.slots.tolist() == first.slots.tolist()
    assert (memory.used, memory.slots.num_free) == (5, 27)
    third = KvLease(memory, tokens, 4, "")
    assert third.slots.tolist() == first.slots.tolist()[:4]
    for lease in (first, second, third):
        lease.close()
    assert (memory.used, memory.cache.num_evictable, memory.slots.num_free) == (0, 5, 27)
    memory.slots.audit()


def test_a_request_that_leaves_without_a_row_leaves_no_trace() -> None:
    memory = KvMemory(8)
    for tenant in ("a", "b"):
        lease = KvLease(memory, ids(1, 2), 1, tenant)
        lease.publish(ids())
        lease.close()
    assert memory.cache._roots == {}


def test_allocation_evicts_only_what_is_missing() -> None:
    memory = KvMemory(8)
    lease = KvLease(memory, ids(1, 2, 3, 4, 5, 6), 5, "")
    lease.append(memory.allocate(6))
    lease.publish(ids(1, 2, 3, 4, 5, 6))
    lease.close()
    assert memory.available == 8
    memory.allocate(4)
    assert memory.cache.num_evictable == 4
    assert len(memory.cache.match(ids(1, 2, 3, 4, 5, 6)).slots) == 4


def test_rows_stay_together_however_long_the_pool_is_used() -> None:
    """Two requests at a time, prompts by chunks and steps in turn: what is read must not come to
    lie in ever smaller pieces.
    """
    draw = random.Random(1)
    memory = KvMemory(16_384, evict_at_least=1_638)
    running: list[tuple[KvLease, NDArray[np.int64], int]] = []
    shares: list[float] = []
    while len(shares) < 400:
        if len(running) < 2:
            prompt = draw.randint(100, 1_500)
            tokens = np.array([draw.getrandbits(40) for _ in range(prompt + 60)], dtype=np.int64)
            running.append((KvLease(memory, tokens, 0, ""), tokens, prompt))
        for lease, tokens, prompt in tuple(running):
            if lease.length < prompt:
                lease.append(memory.allocate(min(256, prompt - lease.length)))
                continue
            tree = memory.allocate(17)
            kept = min(draw.randint(1, 6), len(tokens) - lease.length)
            lease.append(tree[:kept])
            memory.release(tree[kept:])
            if lease.length == len(tokens):
                ends = np.flatnonzero(np.diff(lease.slots) != 1) + 1
                runs = np.diff(np.concatenate([[0], ends, [lease.length]]))
                shares.append(float(runs[runs < 16].sum() / lease.length))
                lease.publish(tokens)
                lease.close()
                running = [one for one in running if one[0] is not lease]
                break
    assert np.mean(shares[:100]) < 0.25
    assert np.mean(shares[300:]) < 0.5  # 0.86 where what is free is not put in order
