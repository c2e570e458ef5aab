import math
from dataclasses import replace

import pytest

from longleaf.capacity.check import Checked, Seen
from longleaf.capacity.model import Model, Objective
from longleaf.capacity.pages import Answer, Prices, words
from longleaf.capacity.search import Found
from longleaf.capacity.traffic import normalized, parse_kind
from longleaf.simulate.commits import load_commits
from tests.capacity.flat import flat


def answer(mix: str, rate: float, replicas: int, cores: float = 1.0) -> Answer:
    model = Model(flat(), load_commits(), normalized([parse_kind(mix)]), 8_000, 4)
    state = model.at(rate, replicas)
    return Answer(Objective(), model, state, None, Prices(20, 4.5, 3, cores), ((model, state),))


@pytest.mark.parametrize(
    ("rate", "cores", "pods"),
    [(10, 1.0, 2), (390, 1.0, 5), (390, 2.0, 3), (390, 8.0, 2)],
)
def test_gateway_pods_by_hand(rate: float, cores: float, pods: int) -> None:
    """4.5 ms and 1000 tokens of 3 µs a request; 60 % of each core."""
    one = answer("1:1000:2:predictable", rate, 1000, cores)
    assert one.gateway_cpu == pytest.approx(rate * 0.0075)
    assert one.pods == pods
    assert one.document()["gateway_pods"] == pods


def test_the_pool_holds_the_answers_that_run_together() -> None:
    one = answer("1:100:2001:predictable", 1.0, 1)
    together = 2000 / load_commits().mean("predictable") * 0.01 / (1 - 0.1)
    assert math.ceil(together) == 3
    slots = math.ceil(3 * (100 + 2001 / 2 + 9))
    assert one.pool == (slots, slots * 1000.0)
    assert one.document()["kv_tokens_in_use"] == pytest.approx(together * (100 + 2001 / 2 + 9))


def test_the_pool_holds_the_largest_request() -> None:
    assert answer("1:1000:101:predictable", 0.5, 1).pool == (1110, 1_110_000)


def test_cost_by_hand() -> None:
    """3 replicas of 20 an hour; 3,600 requests of 1,000 and 500 tokens."""
    one = answer("1:1000:500:predictable", 1.0, 3)
    assert one.cost == pytest.approx((60 / 5.4, 60 / 1.8))


def seen(milliseconds: float) -> Seen:
    return Seen(9, milliseconds / 1e3, 1.0, 0.001)


@pytest.mark.parametrize(
    ("ttft", "tpot", "marks"),
    [(1.3, 0.8, 0), (1.35, 1.0, 1), (0.7, 1.0, 1), (1.0, 1.4, 1), (2.0, 3.0, 2)],
)
def test_times_more_than_a_third_apart_are_marked(ttft: float, tpot: float, marks: int) -> None:
    one = answer("1:1000:101:predictable", 0.5, 1)
    first, each = ttft * one.state.ttft[0] * 1e3, tpot * one.state.tpot * 1e3
    checked = Checked(1, 1, 9, (seen(first),), seen(each))
    one = replace(one, found=Found(1, (checked,), checked))
    assert words(one).count(", differs") == marks
    document = one.document()
    told = (document["kinds"][0]["simulated_ttft_differs"], document["simulated_tpot_differs"])
    assert sum(told) == marks


def test_what_missed_by_less_than_the_spread_stands_beside_the_answer() -> None:
    sizes = {95: 1150.0, 96: 1105.0, 97: 1102.0, 98: 1099.0}
    tried = tuple(
        Checked(size, 16, 9, (Seen(9, ms / 1e3, 2.0, 0.01),), None) for size, ms in sizes.items()
    )
    one = replace(
        answer("1:1000:101:predictable", 0.5, 98),
        objective=Objective(ttft_ms=1100),
        found=Found(95, tried, tried[-1]),
    )
    head, *rest = words(one).splitlines()
    assert head.startswith("98 replicas (96, 97 miss by less than the spread), 2 gateway pods")
    assert any(line.startswith("    95 replicas: missed: TTFT") for line in rest)
    assert any(line.startswith("    96 replicas: missed by less than the spread") for line in rest)
    assert one.document()["missed_by_less_than_spread"] == [96, 97]
    assert [row["by_less_than_spread"] for row in one.document()["simulated"]] == [
        False, True, True, False,
    ]  # fmt: skip
