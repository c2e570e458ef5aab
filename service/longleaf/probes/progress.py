"""How far a long probe is, and how long it will take: one line, renewed."""

import time
from typing import TextIO


class Progress:
    """Writes to a terminal in place, to anything else a line an item."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._begin = time.monotonic()
        self._total = self._done = 0

    def expect(self, total: int) -> None:
        """Say how many items there will be."""
        self._total = total

    def step(self, what: str) -> None:
        """Note one finished item."""
        self._done += 1
        left = (time.monotonic() - self._begin) / self._done * max(0, self._total - self._done)
        bar = "#" * round(20 * self._done / max(self._total, self._done))
        text = f"[{bar:<20}] {self._done}/{self._total}, {left:.0f} s left  {what}"
        if self._out.isatty():
            end = "\n" if self._done == self._total else ""
            print(f"\r\x1b[K{text}", end=end, file=self._out, flush=True)
        else:
            print(text, file=self._out, flush=True)
