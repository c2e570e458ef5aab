"""Signals as exceptions."""

import signal
import threading

import pytest

from longleaf.signals import ENDING, raised


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_raises_where_it_comes_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in ENDING}
    with pytest.raises(SystemExit) as caught, raised():
        signal.raise_signal(number)
    assert caught.value.code == 128 + number
    assert {one: signal.getsignal(one) for one in ENDING} == before


def test_another_thread_leaves_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def look() -> None:
        with raised():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
