"""Which of a run's workers are at its end, and which will never be."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Workers:
    """``finished``: sent all of their share; ``lost``: given up before that. Both by name."""

    finished: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    _begun: frozenset[str] = frozenset()
    _absent: frozenset[str] = frozenset()

    def begin(self, names: Iterable[str]) -> None:
        """The run begins with ``names``."""
        self._begun = frozenset(names)

    def __contains__(self, name: str) -> bool:
        return name in self._begun

    def hear(self, name: str, finished: bool) -> None:
        """``name`` reports, maybe that it is at its end."""
        self.lost.discard(name)
        self._absent -= {name}
        if finished:
            self.finished.add(name)

    def look(self, present: Iterable[str]) -> set[str]:
        """Those that are lost since the last look: absent at both, since one that registers anew
        is so for a moment, and not heard of between them.
        """
        absent = self._begun.difference(present, self.finished)
        fresh = set((absent & self._absent) - self.lost)
        self.lost |= fresh
        self._absent = absent
        return fresh

    def over(self, count: int) -> bool:
        """Whether nothing more is to come of the ``count`` workers of the run."""
        return len(self.finished | self.lost) >= count
