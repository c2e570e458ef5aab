"""Signals as exceptions, so that what is half done is undone and children are ended.

The first process of a container has no default action for SIGTERM: without a handler it stays.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``SystemExit`` with the status that a shell would tell.

    Python delivers signals to its main thread alone: in another one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _raise) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
