"""Pieces of a forward on several threads."""

import threading

import pytest

from longleaf.embedded.workers import Workers


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_every_piece_runs_once(threads: int, count: int) -> None:
    done: list[int] = []
    workers = Workers(threads)
    workers.run([lambda i=i: done.append(i) for i in range(count)])  # type: ignore[misc]
    assert sorted(done) == list(range(count))


def test_pieces_run_side_by_side() -> None:
    meet = threading.Barrier(2, timeout=20)
    seen: set[int] = set()

    def piece() -> None:
        seen.add(threading.get_ident())
        meet.wait()

    Workers(2).run([piece, piece])
    assert len(seen) == 2
    assert threading.get_ident() in seen


def test_what_a_piece_raises_is_raised() -> None:
    def fail() -> None:
        raise ZeroDivisionError("a piece")

    for threads in (1, 2):
        with pytest.raises(ZeroDivisionError, match="a piece"):
            Workers(threads).run([fail] * 3)


def test_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        Workers(0)
