"""Measured step times among the options: sensible ones, and of every captured node count."""

import pytest

from longleaf.engine.options import EngineOptions, captured_nodes, read_options


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("[8, 1024, -1.0]", "milliseconds above 0"),
        ("[8, 1024, 0]", "milliseconds above 0"),
        ("[8, 1024, NaN]", "milliseconds above 0"),
        ("[8, 1024, Infinity]", "milliseconds above 0"),
        ("[8, -1, 3.0]", "context of at least 0"),
        ("[0, 1024, 3.0]", "nodes from 1 to 128"),
        ("[500, 1024, 3.0]", "nodes from 1 to 128"),
        ("[8, 1024, 3.0], [8, 1024, 4.0]", "one time for a node count and context"),
    ],
)
def test_a_step_time_that_cannot_be_is_refused(row: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_options({"LONGLEAF_ENGINE": f'{{"step_ms": [{row}]}}'})


def _timed(*nodes: int) -> tuple[tuple[int, int, float], ...]:
    return tuple((count, 1024, 5.0) for count in nodes)


def test_step_times_are_of_every_captured_node_count_or_of_none() -> None:
    """A time of some counts only would be compared with the model's time of the rest."""
    assert captured_nodes(EngineOptions(step_ms=_timed(1, 8, 9)), 9) == (1, 8, 9)
    assert captured_nodes(EngineOptions((16, 1), step_ms=_timed(1, 16)), 16) == (1, 16)
    with pytest.raises(ValueError, match=r"of \[8\] nodes, captured are \[1, 8, 9\]"):
        captured_nodes(EngineOptions(step_ms=_timed(8)), 9)
    with pytest.raises(ValueError, match=r"of \[1, 7, 16\] nodes, captured are \[1, 16\]"):
        captured_nodes(EngineOptions((1, 16), step_ms=_timed(1, 7, 16)), 16)
