"""Ctrl-C, pressed by someone who does not know that once was enough."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def keyboard_interrupt() -> NoReturn:
    """What a SIGINT does."""
    raise KeyboardInterrupt


def interrupt_once(interrupt: Callable[[], object] = keyboard_interrupt) -> None:
    """Let the next SIGINT call ``interrupt`` and no other do anything. Where the process ignores
    it, or does something of its own, nothing changes.
    """

    def last(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        interrupt()

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, last)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT does nothing meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
