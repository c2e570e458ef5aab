"""Ctrl-C, pressed by someone who does not know that once was enough."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def interrupt_once() -> None:
    """Let the next SIGINT raise ``KeyboardInterrupt`` and no other. Where the process ignores it,
    or does something of its own, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _last)


def _last(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT does nothing meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
