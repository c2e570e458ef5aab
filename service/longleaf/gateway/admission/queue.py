"""The order in which waiting requests get their turn: by priority, which age makes up for, and
among equals by fair shares of their keys.

Start-time fair queueing: a request's tag is where its key's service has come to, counted in tokens;
a key that waits with many requests does not push back one that waits with few.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(eq=False, slots=True)
class Waiting(Generic[Item]):
    """One waiting request. ``priority``: more is earlier; ``arrived``: monotonic seconds."""

    item: Item
    key: str
    priority: int
    arrived: float
    cost: int
    """Tokens, for the fair shares."""
    size: int = 0
    """Bytes that it keeps in memory."""
    tag: float = 0.0
    overtaken: int = 0
    """Requests that started before this one although it was ahead of them."""
    number: int = field(default=0)


class FairQueue(Generic[Item]):
    """At most ``size`` waiting requests, of ``max_bytes`` together. Pure: knows no clock."""

    def __init__(self, size: int, max_bytes: int, aging_interval: float) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._bytes = 0
        self._aging_interval = aging_interval
        self._waiting: list[Waiting[Item]] = []
        self._counts: Counter[str] = Counter()
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting[Item]]:
        return iter(tuple(self._waiting))

    def add(self, waiting: Waiting[Item]) -> None:
        """Let ``waiting`` in. ``surplus`` must be asked before anything else comes."""
        self._number += 1
        waiting.number = self._number
        waiting.tag = self._next_tag(waiting.key)
        self._finish[waiting.key] = waiting.tag + waiting.cost
        self._waiting.append(waiting)
        self._counts[waiting.key] += 1
        self._bytes += waiting.size

    @property
    def crowded(self) -> bool:
        """Whether more wait than may: ``surplus`` is to be asked."""
        return self._bytes > self._max_bytes or len(self._waiting) > self._size

    def surplus(self, newcomer: Waiting[Item]) -> Waiting[Item] | None:
        """Take out who is too many since ``newcomer`` came: ``None``, or itself, or, where too many
        wait, the last of a key that holds more places than its own.
        """
        if not self.crowded:
            return None
        victim = newcomer if self._bytes > self._max_bytes else self._victim(newcomer)
        self.remove(victim)
        return victim

    def remove(self, waiting: Waiting[Item]) -> bool:
        """Take ``waiting`` out, which had no service: its key's others move up. Whether it was
        there.
        """
        if not self._drop(waiting):
            return False
        key, cost = waiting.key, waiting.cost
        if key in self._finish:
            self._finish[key] -= cost
        for other in self._waiting:
            if other.key == key and other.number > waiting.number:
                other.tag = min(other.tag, max(self._virtual, other.tag - cost))
        return True

    def _drop(self, waiting: Waiting[Item]) -> bool:
        if waiting not in self._waiting:
            return False
        self._waiting.remove(waiting)
        self._bytes -= waiting.size
        self._counts[waiting.key] -= 1
        if not self._counts[waiting.key]:
            del self._counts[waiting.key]
        return True

    def serve(self, waiting: Waiting[Item]) -> None:
        """``waiting`` gets its turn: it leaves, its key's share moves on."""
        self._drop(waiting)
        self._virtual = max(self._virtual, waiting.tag)
        for key in [key for key, finish in self._finish.items() if finish <= self._virtual]:
            del self._finish[key]

    def ordered(self, now: float) -> list[Waiting[Item]]:
        """Everyone, first one first. With age a low priority comes up to the highest that waits and
        no further: among equals shares decide, or who sends most would always be the oldest.
        """
        top = max((waiting.priority for waiting in self._waiting), default=0)
        return sorted(
            self._waiting,
            key=lambda waiting: (-self._level(waiting, top, now), waiting.tag, waiting.number),
        )

    def before(self, key: str, priority: int, now: float) -> list[Waiting[Item]]:
        """Those who would have their turn before one that came now, in no order."""
        top = max([priority, *(waiting.priority for waiting in self._waiting)])
        own = (-priority, self._next_tag(key))
        return [
            waiting
            for waiting in self._waiting
            if (-self._level(waiting, top, now), waiting.tag) <= own
        ]

    def _next_tag(self, key: str) -> float:
        return max(self._virtual, self._finish.get(key, 0.0))

    def _level(self, waiting: Waiting[Item], top: int, now: float) -> int:
        age = math.floor((now - waiting.arrived) / self._aging_interval)
        return min(waiting.priority + age, top)

    def _victim(self, newcomer: Waiting[Item]) -> Waiting[Item]:
        key, most = max(self._counts.items(), key=lambda count: count[1])
        if most <= self._counts[newcomer.key]:
            return newcomer
        return max(
            (waiting for waiting in self._waiting if waiting.key == key),
            key=lambda waiting: (-waiting.priority, waiting.number),
        )
