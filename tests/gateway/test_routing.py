"""Where requests go: the radix tree of prefixes, the policies, the expected cost."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from longleaf.gateway.admission.demand import Demand
from longleaf.gateway.config import RoutingPolicyName
from longleaf.gateway.replicas.budget import Need, ReplicaBudget, Rules
from longleaf.gateway.replicas.client import ReplicaClient
from longleaf.gateway.replicas.facts import ReplicaLimits
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.policy import Routing, _lowest
from longleaf.gateway.routing.prefix import BLOCK_BYTES, Prefix, PrefixIndex, prefix_of
from longleaf.gateway.routing.prefix_tree import PrefixTree
from longleaf.metrics import GatewayMetrics
from tests.gateway.faulty_replica import answer_captured_chat
from tests.gateway.running import chat, gateway_over

pytestmark = pytest.mark.anyio

WORDS = st.lists(st.integers(0, 2), max_size=12)


def choose(routing: Routing, replicas: Sequence[Replica], asked: Demand) -> Replica:
    """Its choice where all have room."""
    chosen = routing.choose(replicas, asked, lambda _: True)
    assert chosen is not None
    return chosen


def chained(words: Sequence[int]) -> tuple[int, ...]:
    """Blocks as they are made: each one's hash covers all before it."""
    blocks: list[int] = []
    seed = 0
    for word in words:
        seed = hash((seed, word))
        blocks.append(seed)
    return tuple(blocks)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@given(st.lists(WORDS, max_size=12), WORDS)
def test_tree_matches_the_longest_prefix_seen(seen: list[list[int]], asked: list[int]) -> None:
    tree = PrefixTree(1 << 30)
    for words in seen:
        tree.insert(chained(words))
    assert tree.match(chained(asked)) == max((common(words, asked) for words in seen), default=0)
    prefixes = {tuple(words[:n]) for words in seen for n in range(1, len(words) + 1)}
    assert tree.blocks == len(prefixes)


@given(st.lists(WORDS, max_size=20), st.integers(0, 10))
def test_tree_forgets_the_oldest_first(seen: list[list[int]], most: int) -> None:
    tree = PrefixTree(1 << 30)
    for words in seen:
        tree.insert(chained(words), most)
        assert tree.blocks <= most
        if len(words) <= most:
            assert tree.match(chained(words)) == len(words)


def test_tree_stays_within_its_bytes() -> None:
    tree = PrefixTree(20_000)
    for number in range(200):
        tree.insert(chained([number, *range(10)]))
        assert tree.bytes <= 20_000
    assert tree.match(chained([199, *range(10)])) == 11
    assert tree.match(chained([0, *range(10)])) == 0


def body(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", **fields, "messages": messages}).encode()


def test_next_turn_of_a_conversation_shares_all_of_the_last_one() -> None:
    long = "word " * 2000
    first = prefix_of(body(long), "m", ["messages"])
    second = prefix_of(body(long, "and then?", temperature=1), "m", ["messages"])
    assert len(first.blocks) == first.size // BLOCK_BYTES
    assert common(first.blocks, second.blocks) >= len(first.blocks) - 1
    assert common(first.blocks, prefix_of(body(long), "other", ["messages"]).blocks) == 0


@pytest.mark.parametrize("first", [True, False])
def test_tools_stand_before_the_messages(first: bool) -> None:
    def with_tools(name: str) -> Prefix:
        tools = {"tools": [{"type": "function", "function": {"name": name}}]}
        fields = {"messages": [{"role": "user", "content": "x" * 5000}]}
        given = {**tools, **fields} if first else {**fields, **tools}
        return prefix_of(json.dumps(given).encode(), "m", list(given))

    one, same, other = (with_tools(name) for name in ("search", "search", "browse"))
    assert common(one.blocks, same.blocks) == len(one.blocks) > 0
    assert common(one.blocks, other.blocks) == 0


def replica(number: int = 0, capacity: int = 100_000) -> Replica:
    url = f"http://127.0.0.1:{number + 1}"
    budget = ReplicaBudget(Rules(1 << 20, 0))
    budget.set_limits(ReplicaLimits(None, None, capacity))
    metrics = GatewayMetrics(CollectorRegistry())
    return Replica(url, ReplicaClient(url, 1.0, None), metrics, 3, 2, budget)


def demand(prefix: Prefix | None = None, prompt: int = 1_000) -> Demand:
    return Demand("m", prompt, 100, prefix=prefix)


LONG = prefix_of(body("word " * 4000), "m", ["messages"])


async def test_a_replica_that_was_away_has_nothing_cached() -> None:
    index, one = PrefixIndex(1 << 20), replica()
    index.placed(one, LONG)
    assert 0.9 < index.share(one, LONG) <= 1.0
    assert index.share(replica(1), LONG) == 0.0
    one.cache_age += 1
    assert index.share(one, LONG) == 0.0
    index.placed(one, LONG)
    assert index.share(one, LONG) > 0.9


async def test_shares_are_those_of_each() -> None:
    index, ones = PrefixIndex(1 << 20), [replica(n) for n in range(4)]
    index.placed(ones[0], LONG)
    index.placed(ones[1], Prefix(LONG.blocks[:5], 5 * BLOCK_BYTES))
    index.placed(ones[2], Prefix((1, 2, 3), 3 * BLOCK_BYTES))
    index.placed(ones[3], LONG)
    ones[3].cache_age += 1
    assert index.shares(LONG) == {one: index.share(one, LONG) for one in ones[:2]}
    assert 0 < index.share(ones[1], LONG) < index.share(ones[0], LONG)
    assert index.shares(None) == {}


async def test_a_small_pool_holds_no_long_prefix() -> None:
    index, one = PrefixIndex(1 << 20), replica(capacity=1_000)
    index.placed(one, LONG)
    assert index.share(one, LONG) == 0.0


@pytest.mark.parametrize("name", ["expected_cost", "prefix"])
async def test_a_prompt_goes_where_it_is_cached(name: RoutingPolicyName) -> None:
    routing, replicas = Routing(name, 1 << 20), [replica(n) for n in range(3)]
    asked = demand(LONG, 20_000)
    first = choose(routing, replicas, asked)
    routing.placed(first, asked)
    for _ in range(5):
        again = choose(routing, replicas, asked)
        assert again is first
        routing.placed(again, asked)
    cached = routing.cached_tokens(first, asked)
    assert 18_000 < cached <= 20_000


@pytest.mark.parametrize("name", ["expected_cost", "kv_pressure", "round_robin"])
async def test_equals_take_turns(name: RoutingPolicyName) -> None:
    routing, replicas = Routing(name, 1 << 20), [replica(n) for n in range(3)]
    chosen = []
    for _ in range(6):
        chosen.append(choose(routing, replicas, demand()))
        assert choose(routing, replicas, demand()) is chosen[-1]  # asking changes nothing
        routing.placed(chosen[-1], demand())
    assert [one.url for one in chosen] == [one.url for one in replicas * 2]


async def test_a_cost_that_is_no_number_costs_most() -> None:
    ones = [replica(n) for n in range(3)]
    assert _lowest(ones, [math.nan, 2.0, 2.0]) == ones[1:]
    assert _lowest(ones, [math.nan, math.inf, math.nan]) == ones


async def test_kv_pressure_takes_the_emptiest_pool() -> None:
    routing, (big, small) = Routing("kv_pressure", 0), (replica(0), replica(1, 10_000))
    big.budget.reserve(Need(20_000, 20_000, 20_000))
    assert choose(routing, [big, small], demand()) is small
    small.budget.reserve(Need(5_000, 5_000, 5_000))
    assert choose(routing, [big, small], demand()) is big


async def test_expected_cost_weighs_the_prefix_against_the_queue_before_it() -> None:
    routing, (warm, cold) = Routing("expected_cost", 1 << 20), (replica(0), replica(1))
    asked = demand(LONG, 20_000)
    routing.placed(warm, asked)
    waits = []
    for prompt in (0, 10_000, 50_000):
        if prompt:
            waits.append(warm.budget.reserve(Need(prompt, prompt, prompt)))
        chosen = choose(routing, [warm, cold], asked)
        assert chosen is (cold if prompt == 50_000 else warm)
    for wait in waits:
        wait.release()
    assert choose(routing, [warm, cold], asked) is warm


async def test_expected_cost_avoids_the_replica_whose_steps_are_slow() -> None:
    routing, (slow, fast) = Routing("expected_cost", 0), (replica(0), replica(1))
    for context in (1_000.0, 50_000.0, 100_000.0) * 5:
        slow.budget.steps.observe(context, 2.0, 0.02 + 1e-6 * context)
        fast.budget.steps.observe(context, 2.0, 0.01 + 1e-6 * context)
    assert [choose(routing, [slow, fast], demand()) for _ in range(3)] == [fast] * 3
    for _ in range(8):  # what it adds to others' steps counts too
        fast.budget.reserve(Need(10_000, 0, 10_000))
    assert choose(routing, [slow, fast], demand()) is slow


async def test_among_many_the_cheapest_is_found_and_equals_take_turns() -> None:
    routing, replicas = Routing("expected_cost", 1 << 20), [replica(n) for n in range(40)]
    chosen = []
    for _ in range(80):
        chosen.append(choose(routing, replicas, demand()))
        routing.placed(chosen[-1], demand())
    assert [chosen.count(one) for one in replicas] == [2] * 40
    for number, one in enumerate(replicas):
        if number != 23:
            one.budget.reserve(Need(5_000, 5_000, 5_000))
    asked = demand(LONG, 20_000)
    for _ in range(3):
        assert choose(routing, replicas, asked) is replicas[23]
        routing.placed(replicas[23], demand())  # whose turn it is makes no difference
    routing.placed(replicas[7], asked)
    assert choose(routing, replicas, asked) is replicas[7]  # 5,000 before it, but it has the prompt


async def test_among_many_room_is_asked_of_as_many_as_are_compared() -> None:
    routing, replicas = Routing("expected_cost", 0), [replica(n) for n in range(40)]
    asked: list[Replica] = []

    def room(one: Replica) -> bool:
        asked.append(one)
        return one not in replicas[:3]

    for one in replicas[20:]:
        one.budget.reserve(Need(5_000, 5_000, 5_000))
    assert routing.choose(replicas, demand(), room) is replicas[3]
    assert asked == replicas[:11]


@pytest.mark.parametrize("name", get_args(RoutingPolicyName))
@pytest.mark.parametrize("fleet", [1, 3, 20])
async def test_only_one_with_room_is_chosen(name: RoutingPolicyName, fleet: int) -> None:
    routing, replicas = Routing(name, 1 << 20), [replica(n) for n in range(fleet)]
    last = replicas[-1]
    last.budget.reserve(Need(5_000, 5_000, 5_000))
    assert routing.choose(replicas, demand(), lambda one: one is last) is last
    assert routing.choose(replicas, demand(), lambda _: False) is None


async def test_conversations_stay_where_they_are_and_spread() -> None:
    async with gateway_over(
        *[answer_captured_chat] * 3, routing="expected_cost", max_prefill_tokens=10**6
    ) as (gateway, replicas):
        for turn in range(3):
            for talk in range(6):
                text = f"conversation {talk} " + "word " * 3000 + "then? " * turn
                messages = [{"role": "user", "content": text}]
                for one in replicas:
                    one.prompt_tokens = 3_000
                assert (await gateway.answer(chat(messages=messages)))[0] == 200
    homes: dict[str, set[int]] = {}
    for number, one in enumerate(replicas):
        for received in one.generations:
            talk = received.json["messages"][0]["content"][:14]
            homes.setdefault(talk, set()).add(number)
    assert [len(places) for places in homes.values()] == [1] * 6
    assert len(set().union(*homes.values())) == 3


def test_hashes_of_a_chain_differ() -> None:
    assert all(one != other for one, other in pairwise(LONG.blocks))
