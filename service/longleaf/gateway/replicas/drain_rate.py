"""How fast a replica gets through its requests, for an honest ``Retry-After``."""

UNKNOWN_SECONDS = 10.0
"""What a client is told to wait while no rate is known."""
_HALF_LIFE = 30.0


class DrainRate:
    """Amounts given back a second while anything was held; older ones count less and less."""

    def __init__(self) -> None:
        self._tokens = self._sequences = self._seconds = 0.0

    def passed(self, seconds: float) -> None:
        """Busy time went by."""
        keep = 0.5 ** (seconds / _HALF_LIFE)
        self._tokens *= keep
        self._sequences *= keep
        self._seconds = self._seconds * keep + seconds

    def freed(self, tokens: int, sequences: int) -> None:
        """Something was given back."""
        self._tokens += tokens
        self._sequences += sequences

    def per_second(self) -> tuple[float, float] | None:
        """Tokens and sequences a second; ``None`` before anything was given back."""
        if not self._sequences:
            return None
        seconds = max(self._seconds, 1e-3)
        return self._tokens / seconds, self._sequences / seconds
