"""Progress of a long measurement: how far, and how long it will take."""

import time
from typing import TextIO


class Progress:
    """Prints one line a finished item with an estimate of the time left."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._begin = time.monotonic()
        self._total = 0
        self._done = 0

    def expect(self, total: int) -> None:
        """Say how many items there will be."""
        self._total = total

    def step(self, what: str) -> None:
        """Note one finished item."""
        self._done += 1
        elapsed = time.monotonic() - self._begin
        left = elapsed / self._done * max(0, self._total - self._done)
        print(
            f"[{self._done}/{self._total}, {left:4.0f} s left] {what}", file=self._out, flush=True
        )
