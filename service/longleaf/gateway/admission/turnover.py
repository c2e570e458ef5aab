"""How fast waiting requests get their turn: what an honest ``Retry-After`` goes by.

Whatever it is that they wait for (KV pool, sequences, prefill), this is what comes of it. Short
prompts overtake long ones, so each class has a rate of its own, over the time that it waited. It
looks back at as much as waits now: further where 64 replicas have a long queue than where one has.
"""

import time
from collections import deque
from collections.abc import Callable, Container

_FEWEST = 3
"""Turns after which a rate means something."""
_LEAST = 32
"""Turns to look back at, where there were so many: prompts differ a hundredfold."""
_MOST = 1024
"""Turns that are remembered."""


class Turnover:
    """Turns of two classes, ``short`` or not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = {True: 0.0, False: 0.0}
        """Seconds that a class has waited since its last turn."""
        self._turns: dict[bool, deque[tuple[float, int]]] = {
            short: deque(maxlen=_MOST) for short in (True, False)
        }
        """Those seconds when it came, and its tokens."""
        self._waiting: Container[bool] = ()
        self._until = clock()

    def note(self, waiting: Container[bool]) -> None:
        """Classes that wait from now on; the time until now counts for those that did before."""
        now = self._clock()
        for short in self._since:
            if short in self._waiting:
                self._since[short] += now - self._until
        self._until, self._waiting = now, waiting

    def served(self, short: bool, tokens: int) -> None:
        """One of a class, that had to wait, got its turn."""
        self.note(self._waiting)
        self._turns[short].append((self._since[short], tokens))
        self._since[short] = 0.0

    def tokens_per_second(self, short: bool, tokens: int) -> float | None:
        """What of a class got its turn in a second, while the last ``tokens`` of it did; ``None``
        while too little was seen.
        """
        turns = self._turns[short]
        if len(turns) < _FEWEST:
            return None
        self.note(self._waiting)
        seconds, found = self._since[short], 0
        for number, (took, amount) in enumerate(reversed(turns)):
            if number >= _LEAST and found >= tokens:
                break
            seconds += took
            found += amount
        return found / max(seconds, 1e-3)
