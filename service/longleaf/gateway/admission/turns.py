"""One round through the queue: who may use what is free."""

from collections import Counter
from collections.abc import Sequence
from typing import Generic

from longleaf.gateway.admission.queue import Item, Waiting
from longleaf.gateway.replicas.replica import Replica

_LOOK_PAST = 16
"""Requests without room for whom the search looks on; after so many a replica counts as full."""


class Turns(Generic[Item]):
    """One round through the queue, first one first: who was passed over, and what that means for
    those behind.

    A replica that somebody who was passed over could use is for short prompts alone. It is kept
    from them too once so many want it that it counts as full, or one of those has been overtaken
    as often as may be.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._passed: list[tuple[Waiting[Item], list[Replica]]] = []
        self._wanted: Counter[Replica] = Counter()
        """Of how many that were passed over each replica could be used."""
        self._kept: set[Replica] = set()
        """Replicas that nobody behind may use."""

    def may_use(self, replica: Replica, short: bool) -> bool:
        """Whether the next request may go to ``replica``."""
        return replica not in self._kept and (short or replica not in self._wanted)

    def passed(self, waiting: Waiting[Item], able: list[Replica]) -> None:
        """``waiting`` found no place on ``able``, the replicas that it could use."""
        self._passed.append((waiting, able))
        self._wanted.update(able)
        self._kept.update(replica for replica in able if self._wanted[replica] >= _LOOK_PAST)
        if waiting.overtaken >= self._max_overtakes:
            self._kept.update(able)

    def served(self, replica: Replica) -> None:
        """One got a place on ``replica``: it has overtaken all that wait for it."""
        for waiting, able in self._passed:
            if replica in able:
                waiting.overtaken += 1
                if waiting.overtaken >= self._max_overtakes:
                    self._kept.update(able)

    def over(self, ready: Sequence[Replica]) -> bool:
        """Whether nobody behind can get anything."""
        return self._kept.issuperset(ready)
