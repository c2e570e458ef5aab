"""Limits of an API key: requests and tokens a minute."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from longleaf.gateway.auth import ApiKey

_MINUTE = 60.0


class KeyLimitError(Exception):
    """The key has used up its minute."""

    def __init__(self, what: Literal["requests", "tokens"], limit: int, retry_after: float) -> None:
        super().__init__(f"This key may use {limit} {what} a minute.")
        self.what = what
        self.retry_after = retry_after


class TokenBucket:
    """``limit`` a minute, refilled evenly; a full bucket may be emptied at once."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` may be taken. More than a minute's worth needs a full bucket."""
        self._refill(now)
        return max(0.0, (min(amount, self.limit) - self._level) * _MINUTE / self.limit)

    def take(self, amount: float) -> None:
        """Take ``amount``; the level may go below zero. A negative amount goes back in."""
        self._level = min(self._level - amount, float(self.limit))

    def change(self, limit: int, now: float) -> None:
        """From now on ``limit`` a minute; what was taken stays taken."""
        self._refill(now)
        self.limit = limit
        self._level = min(self._level, float(limit))

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self.limit / _MINUTE
        self._level = min(self._level + gained, float(self.limit))
        self._at = now


@dataclass(slots=True)
class Charge:
    """Tokens that a request was charged; settled once its true number is known."""

    _bucket: TokenBucket | None
    _tokens: int

    @property
    def matters(self) -> bool:
        """Whether the key has a limit of tokens: then the true number must be known."""
        return self._bucket is not None

    @property
    def tokens(self) -> int:
        """Tokens charged so far."""
        return self._tokens

    def settle(self, tokens: int) -> None:
        """It took ``tokens`` in truth."""
        if self._bucket is not None:
            self._bucket.take(tokens - self._tokens)
            self._tokens = tokens


class KeyLimits:
    """The buckets of all keys; they outlast a reload of the key file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def peek(self, key: ApiKey | None, tokens: int) -> None:
        """Raise ``KeyLimitError`` where ``charge`` would; take nothing."""
        if key is None or not key.limited:
            return
        now = self._clock()
        for what, limit, amount in _wanted(key, tokens):
            wait = self._bucket(key, what, limit, now).wait(amount, now)
            if wait > 0:
                raise KeyLimitError(what, limit, wait)

    def charge(self, key: ApiKey | None, tokens: int) -> Charge:
        """Take one request and ``tokens`` from what ``key`` may use. ``KeyLimitError``: nothing is
        taken.
        """
        if key is None or not key.limited:
            return Charge(None, tokens)
        self.peek(key, tokens)
        charged: TokenBucket | None = None
        now = self._clock()
        for what, limit, amount in _wanted(key, tokens):
            bucket = self._bucket(key, what, limit, now)
            bucket.take(amount)
            if what == "tokens":
                charged = bucket
        return Charge(charged, tokens)

    def _bucket(self, key: ApiKey, what: str, limit: int, now: float) -> TokenBucket:
        bucket = self._buckets.get((key.id, what))
        if bucket is None:
            bucket = self._buckets[key.id, what] = TokenBucket(limit, now)
        elif bucket.limit != limit:
            bucket.change(limit, now)
        return bucket


def _wanted(key: ApiKey, tokens: int) -> list[tuple[Literal["requests", "tokens"], int, float]]:
    wanted: list[tuple[Literal["requests", "tokens"], int, float]] = []
    if key.requests_per_minute is not None:
        wanted.append(("requests", key.requests_per_minute, 1.0))
    if key.tokens_per_minute is not None:
        wanted.append(("tokens", key.tokens_per_minute, float(tokens)))
    return wanted
