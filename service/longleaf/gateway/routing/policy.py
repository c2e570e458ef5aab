"""Routing policies: pick one of the replicas that could hold a request and have room for it now.

Whether one has room costs more than to tell which would be best: it is asked only of as many as
needed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
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

Room = Callable[[Replica], bool]
"""Whether a replica has room for the request now."""


class RoutingPolicy(Protocol):
    """Chooses among replicas that are ready, serve the model and could hold the request."""

    def choose(self, replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        """One of ``replicas`` that has ``room``; ``None`` where none has. Changes nothing."""
        ...


class Turns:
    """Whose turn it is among equals."""

    def __init__(self) -> None:
        self._number = 0

    def pick(self, equals: Sequence[Replica]) -> Replica:
        """One of ``equals``: another after each ``next``."""
        return equals[self._number % len(equals)]

    def turned(self, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """All of them, from the one whose turn it is."""
        first = self._number % len(replicas)
        return [*replicas[first:], *replicas[:first]]

    def next(self) -> None:
        """A request was placed."""
        self._number += 1


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def choose(self, replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        """The one whose turn it is."""
        candidates = list(filter(room, replicas))
        return self._turns.pick(candidates) if candidates else None


class KvPressure:
    """The replica whose KV pool will be least full; equals take turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def choose(self, replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        """The emptiest one."""
        candidates = list(filter(room, replicas))
        if not candidates:
            return None
        return self._turns.pick(_lowest(candidates, [_pressure(one) for one in candidates]))


class PrefixAware:
    """The replica that has most of the prompt cached, unless it is much busier than others."""

    def __init__(self, turns: Turns, index: PrefixIndex) -> None:
        self._turns = turns
        self._index = index

    def choose(self, replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        """The one with the longest prefix, or the least busy one."""
        candidates = list(filter(room, replicas))
        if not candidates:
            return None
        fewest = min(one.in_flight for one in candidates)
        cached = self._index.shares(demand.prefix)
        shares = [
            cached.get(one, 0.0) if one.in_flight <= fewest + _MOST_MORE else 0.0
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

    def choose(self, replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        """The cheapest one; equals take turns."""
        cached = self._index.shares(demand.prefix)
        many = len(replicas) > _COMPARED
        order: Iterable[Replica] = replicas
        if many:
            order = _least_ahead_first(self._turns.turned(replicas), cached, demand)
        candidates = list(islice(filter(room, order), _COMPARED))
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        shares = [cached.get(one, 0.0) for one in candidates]
        equals = _lowest(candidates, expected_costs(candidates, shares, demand))
        return equals[0] if many else self._turns.pick(equals)


class Routing:
    """A policy, and what is known of the replicas' caches."""

    def __init__(self, name: RoutingPolicyName, index_bytes: int) -> None:
        self._index = PrefixIndex(index_bytes)
        self._turns = Turns()
        self._policy = _POLICIES[name](self._turns, self._index)

    def choose(self, replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        """As the policy says: one of ``replicas`` that has ``room``, or ``None``."""
        return self._policy.choose(replicas, demand, room)

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


def _least_ahead_first(
    replicas: Sequence[Replica], cached: Mapping[Replica, float], demand: Demand
) -> list[Replica]:
    prompt = prompt_tokens(demand)

    def ahead(one: Replica) -> tuple[float, int]:
        return prefill_tokens(one.budget, cached.get(one, 0.0), prompt), one.budget.batch

    return sorted(replicas, key=ahead)


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
