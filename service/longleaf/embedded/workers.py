"""Threads for the few places where one forward has large independent pieces."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Piece = Callable[[], None]


class Workers:
    """Runs pieces of numpy work (which lets go of the interpreter lock) on ``threads`` threads.

    The caller's thread is one of them; helpers start with the first call that has two pieces, and
    end when the object is dropped. Helpers sleep between calls, so a busy machine costs them their
    turn but stalls nobody.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._threads = threads
        self._helpers = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="forward")

    def run(self, pieces: Sequence[Piece]) -> None:
        """Run every piece once, in any order; returns when all are done. Raises what one raised."""
        pending = iter(pieces)

        def drain() -> None:
            for piece in pending:
                piece()

        helping = min(self._threads, len(pieces)) - 1
        futures = [self._helpers.submit(drain) for _ in range(helping)]
        try:
            drain()
        finally:
            for future in futures:
                future.result()
