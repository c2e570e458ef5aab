"""Circuit breaker: a replica whose requests fail gets none for a while, then one, to see.

It sees what health checks do not: a replica that passes them and fails every request.
"""

import time
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]

_LONGEST = 16
"""The longest pause, in first pauses."""


class CircuitBreaker:
    """``closed``; ``open`` after ``threshold`` failures in a row; ``half_open`` once the pause is
    over. Then one request goes on trial: if it fails, the next pause is twice as long.
    """

    def __init__(
        self,
        threshold: int = 5,
        pause: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_pause = pause
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        self._until: float | None = None
        self._trial: object = None

    @property
    def state(self) -> BreakerState:
        """Where it stands."""
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half_open"

    @property
    def allows(self) -> bool:
        """Whether a request may go."""
        if self._until is None:
            return True
        return self._trial is None and self._clock() >= self._until

    def begin(self, request: object) -> None:
        """``request`` goes."""
        if self._until is not None and self._trial is None:
            self._trial = request

    def end(self, request: object) -> None:
        """``request`` is over; without a verdict (its client left) another may try."""
        if self._trial is request:
            self._trial = None

    def succeeded(self) -> None:
        """A request got its answer."""
        self._failures, self._pause, self._until, self._trial = 0, 0.0, None, None

    def failed(self) -> None:
        """A request failed by the replica's fault."""
        self._failures += 1
        if self._until is None and self._failures < self._threshold:
            return
        if self._until is not None and self._clock() < self._until:
            return  # one that was on its way when it opened
        longest = _LONGEST * self._first_pause
        self._pause = min(2 * self._pause or self._first_pause, longest)
        self._until, self._trial = self._clock() + self._pause, None
