"""Routing policies: pick one of the replicas that could take a request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from longleaf.gateway.admission.demand import Demand
from longleaf.gateway.config import RoutingPolicyName
from longleaf.gateway.replicas.replica import Replica


class RoutingPolicy(Protocol):
    """Chooses among candidates that are ready, serve the model and can hold the request."""

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """One of ``candidates`` (never empty)."""
        ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """The next one in turn."""
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)]


class LeastInFlight:
    """The replica with the fewest requests in flight; equals take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, candidates: Sequence[Replica], demand: Demand) -> Replica:
        """The least loaded one."""
        fewest = min(replica.in_flight for replica in candidates)
        equals = [replica for replica in candidates if replica.in_flight == fewest]
        return self._turns.choose(equals, demand)


_POLICIES: Mapping[RoutingPolicyName, Callable[[], RoutingPolicy]] = {
    "least_in_flight": LeastInFlight,
    "round_robin": RoundRobin,
}


def make_policy(name: RoutingPolicyName) -> RoutingPolicy:
    """A fresh policy by its configured name."""
    return _POLICIES[name]()
