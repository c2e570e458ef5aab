"""What a drain changed, and how it is put back."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from longleaf.cluster.client import ClusterError, UnreachableError

LOOK_SECONDS = 0.5
T = TypeVar("T")


def steadily(ask: Callable[[], T], seconds: float) -> T:
    """What ``ask`` answers, asked again for so long while the API server gives no answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except UnreachableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class Step:
    """act: puts it back; said: what is so then; command: how a person would do it."""

    act: Callable[[], object]
    said: str
    command: str


class Undo:
    """Changes and their way back. say: where each is told; seconds: to try each step for."""

    def __init__(self, say: Callable[[str], object], seconds: float) -> None:
        self._say = say
        self._seconds = seconds
        self._steps: list[Step] = []

    def change(self, act: Callable[[], object], back: Step) -> None:
        """Do what ``back`` takes back. Where no answer came, it may have been done."""
        self._steps.append(back)
        try:
            steadily(act, self._seconds)
        except UnreachableError:
            raise
        except ClusterError:
            self._steps.pop()
            raise

    def forget(self) -> None:
        """There is no way back any more."""
        self._steps.clear()

    def run(self) -> None:
        """Go back, the last step first, each on its own; what remains is told. Raises nothing."""
        while self._steps:
            step = self._steps.pop()
            try:
                steadily(step.act, self._seconds)
            except (ClusterError, KeyboardInterrupt, SystemExit) as error:
                why = str(error) or "interrupted"
                self._say(f"not undone ({why}); to undo it: {step.command}")
            else:
                self._say(step.said)
