"""Routing policies: pick one of the replicas that have room for a request."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from longleaf.gateway.admission.demand import Demand
from longleaf.gateway.config import RoutingPolicyName
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.cost import expected_costs, prefill_tokens, prompt_tokens
from longleaf.gateway.routing.prefix import PrefixIndex

_EQUAL = 1.02
_EQUAL_SECONDS = 0.001
_COMPARED = 8
"""Replicas whose costs are compared: those with the least prefill ahead, which are the cheapest but
for details. Of hundreds, to compute them all would be most of the work that a request makes."""
_LEAST_SHARE = 0.25
_MOST_MORE = 8
"""Requests by which a replica with the prefix may be busier than the least busy one."""


class RoutingPolicy(Protocol):
    """Chooses among candidates that are ready, serve the model and have room."""

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """One of ``candidates`` (never empty). Changes nothing."""
        ...


class Turns:
    """Whose turn it is among equals."""

    def __init__(self) -> None:
        self._number = 0

    def pick(self, equals: Sequence[Replica]) -> Replica:
        """One of ``equals``: another after each ``next``."""
        return equals[self._number % len(equals)]

    def turned(self, candidates: Sequence[Replica]) -> Sequence[Replica]:
        """All of them, from the one whose turn it is."""
        first = self._number % len(candidates)
        return [*candidates[first:], *candidates[:first]]

    def next(self) -> None:
        """A request was placed."""
        self._number += 1


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """The one whose turn it is."""
        return self._turns.pick(candidates)


class KvPressure:
    """The replica whose KV pool will be least full; equals take turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """The emptiest one."""
        return self._turns.pick(_lowest(candidates, [_pressure(one) for one in candidates]))


class PrefixAware:
    """The replica that has most of the prompt cached, unless it is much busier than others."""

    def __init__(self, turns: Turns, index: PrefixIndex) -> None:
        self._turns = turns
        self._index = index

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """The one with the longest prefix, or the least busy one."""
        fewest = min(one.in_flight for one in candidates)
        shares = [
            self._index.share(one, demand.prefix) if one.in_flight <= fewest + _MOST_MORE else 0.0
            for one in candidates
        ]
        if max(shares) >= _LEAST_SHARE:
            return candidates[shares.index(max(shares))]
        return self._turns.pick([one for one in candidates if one.in_flight == fewest])


class ExpectedCost:
    """The replica where the request costs least time: its own, and that of those it slows down."""

    def __init__(self, turns: Turns, index: PrefixIndex) -> None:
        self._turns = turns
        self._index = index

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """The cheapest one; equals take turns."""
        if len(candidates) == 1:
            return candidates[0]
        many = len(candidates) > _COMPARED
        if many:
            candidates = self._least_ahead(self._turns.turned(candidates), demand)
        shares = [self._index.share(one, demand.prefix) for one in candidates]
        equals = _lowest(candidates, expected_costs(candidates, shares, demand))
        return equals[0] if many else self._turns.pick(equals)

    def _least_ahead(self, candidates: Sequence[Replica], demand: Demand) -> Sequence[Replica]:
        prompt = prompt_tokens(demand)

        def ahead(one: Replica) -> tuple[float, int]:
            share = self._index.share(one, demand.prefix)
            return prefill_tokens(one.budget, share, prompt), one.budget.batch

        return heapq.nsmallest(_COMPARED, candidates, ahead)


class Routing:
    """A policy, and what is known of the replicas' caches."""

    def __init__(self, name: RoutingPolicyName, index_bytes: int) -> None:
        self._index = PrefixIndex(index_bytes)
        self._turns = Turns()
        self._policy = _POLICIES[name](self._turns, self._index)

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """As the policy says."""
        return self._policy.choose(candidates, demand)

    def placed(self, replica: Replica, demand: Demand) -> None:
        """The request goes to ``replica``: its prompt will be in the cache there."""
        self._turns.next()
        self._index.placed(replica, demand.prefix)

    def cached_tokens(self, replica: Replica, demand: Demand) -> int:
        """Prompt tokens that ``replica`` should have cached."""
        return int(self._index.share(replica, demand.prefix) * demand.size)


_POLICIES: Mapping[RoutingPolicyName, Callable[[Turns, PrefixIndex], RoutingPolicy]] = {
    "expected_cost": ExpectedCost,
    "prefix": PrefixAware,
    "kv_pressure": lambda turns, _: KvPressure(turns),
    "round_robin": lambda turns, _: RoundRobin(turns),
}


def _lowest(candidates: Sequence[Replica], costs: Sequence[float]) -> list[Replica]:
    """Those that cost least, or hardly more: at least one, whatever a replica made of its cost."""
    if any(map(math.isnan, costs)):
        costs = [math.inf if math.isnan(cost) else cost for cost in costs]
    most = min(costs) * _EQUAL + _EQUAL_SECONDS
    return [one for one, cost in zip(candidates, costs, strict=True) if cost <= most]


def _pressure(replica: Replica) -> float:
    budget = replica.budget
    capacity, free = budget.capacity, budget.free_tokens
    if capacity is None or free is None:
        return float(replica.in_flight)
    return 1.0 - free / capacity
