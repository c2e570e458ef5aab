from longleaf.capacity.check import Checked, Seen
from longleaf.capacity.model import Objective
from longleaf.capacity.search import search
from longleaf.capacity.traffic import parse_kind

KINDS = [parse_kind("1:1000:1")]


def shared(replicas: int) -> Checked:
    """10 s of wait that the replicas share."""
    return Checked(replicas, replicas, 9, (Seen(9, 10 / replicas, 10.0, None),), None)


def test_the_smallest_fleet_that_meets_is_found() -> None:
    found = search(shared, 3, Objective(ttft_ms=1250), KINDS)
    assert found.formulas == 3
    assert found.answer == shared(8)
    assert [one.replicas for one in found.tried] == [3, 4, 6, 7, 8]


def test_the_formulas_answer_is_kept_where_it_meets() -> None:
    assert search(shared, 9, Objective(ttft_ms=1250), KINDS).tried == (shared(9),)


def test_a_search_without_hope_ends() -> None:
    found = search(shared, 2, Objective(ttft_ms=1), KINDS)
    assert found.answer.replicas >= 16
    assert not found.answer.meets(Objective(ttft_ms=1), KINDS)
