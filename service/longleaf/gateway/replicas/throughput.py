"""How fast a replica finishes requests, for an honest ``Retry-After``."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 60.0
_UNKNOWN_SECONDS = 10.0


class CompletionRate:
    """Requests finished per second, over the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=1024)
        self._since = clock()

    def completed(self) -> None:
        """Note that a request has run to its end."""
        self._ends.append(self._clock())

    def per_second(self) -> float | None:
        """The rate, or ``None`` while nothing has finished lately."""
        now = self._clock()
        while self._ends and self._ends[0] < now - _WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return None
        if len(self._ends) == self._ends.maxlen:
            span = now - self._ends[0]
        else:
            span = min(_WINDOW_SECONDS, now - self._since)
        return len(self._ends) / max(span, 1e-3)

    def seconds_until_turn(self, waiting: int) -> float:
        """Time until ``waiting`` requests and one more have been taken up, at the current rate.

        Each request that ends makes room for one that waits. With no rate known: 10 s.
        """
        rate = self.per_second()
        return _UNKNOWN_SECONDS if rate is None else (waiting + 1) / rate
