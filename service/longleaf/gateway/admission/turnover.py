"""How fast waiting requests get their turn: what an honest ``Retry-After`` goes by.

Whatever it is that they wait for (KV pool, sequences, prefill), this is what comes of it. Short
prompts overtake long ones, so each class has a rate of its own, over the time that it waited.
"""

import time
from collections.abc import Callable, Container

from longleaf.gateway.replicas.drain_rate import DrainRate

_FEWEST = 3
"""Turns after which a rate means something."""


class Turnover:
    """Rates of two classes, ``short`` or not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = {True: DrainRate(), False: DrainRate()}
        self._turns = {True: 0, False: 0}
        self._waiting: Container[bool] = ()
        self._until = clock()

    def note(self, waiting: Container[bool]) -> None:
        """Classes that wait from now on; the time until now counts for those that did before."""
        now = self._clock()
        for short, rate in self._rates.items():
            if short in self._waiting:
                rate.passed(now - self._until)
        self._until, self._waiting = now, waiting

    def served(self, short: bool, tokens: int) -> None:
        """One of a class got its turn."""
        self._rates[short].freed(tokens, 1)
        self._turns[short] += 1

    def tokens_per_second(self, short: bool) -> float | None:
        """What of a class gets its turn in a second; ``None`` while too little was seen."""
        rate = self._rates[short].per_second()
        return None if rate is None or self._turns[short] < _FEWEST else rate[0]
