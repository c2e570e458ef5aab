from collections.abc import Sequence
from typing import Any

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import Curve, parse_curve
from longleaf.simulate.fleet import Fleet
from longleaf.simulate.offline import Job, Offline, Served

TOKENIZER = Tokenizer.load(DEFAULT_MODELS / "tiny-target")
CURVE: dict[str, Any] = {
    "name": "flat",
    "nodes": 1,
    "kv_bytes_per_token": 1000,
    "steps": [{"context": 1, "batch": 1, "seconds": 0.1}],
    "prefill": [
        {"context": 10, "cached": 0, "seconds": 0.01},
        {"context": 10_000, "cached": 0, "seconds": 10.0},
    ],
}
"""1 ms for each token of a prompt, 100 ms for a step."""


def offline(pool: int = 20_000, sequences: int = 8) -> Offline:
    limits = SchedulerOptions(
        context_length=pool,
        max_total_tokens=pool,
        max_running_requests=sequences,
        chunked_prefill_size=500,
        prefill_first=True,
    )
    return Offline(flat(), load_commits(), limits, TOKENIZER)


def flat() -> Curve:
    return parse_curve(CURVE, "flat")


def jobs(*rows: tuple[float, int, int], cached: int = 0) -> list[Job]:
    return [Job(at, prompt, answer, "prose", n, cached) for n, (at, prompt, answer) in
            enumerate(rows)]  # fmt: skip


def ttfts(served: Sequence[Served]) -> list[float | None]:
    return [one.ttft for one in served]


def test_one_replica_by_hand() -> None:
    """Prompts come first, one after the other; both answers' ten steps wait for them."""
    served = offline().run(jobs((0.0, 1000, 11), (0.2, 500, 11)))
    assert ttfts(served) == pytest.approx([1.0, 1.3])
    assert [one.end for one in served] == pytest.approx([2.5, 2.3])


def test_what_is_cached_takes_no_time() -> None:
    served = offline().run(jobs((0.0, 3000, 2), cached=2000))
    assert ttfts(served) == pytest.approx([1.0])


def test_cached_tokens_need_their_room() -> None:
    """Of two requests of 3,000 tokens a pool of 5,000 holds one, whatever was cached of them."""
    served = offline(5_000).run(jobs((0.0, 3000, 11), (0.0, 3000, 11), cached=2000))
    assert ttfts(served) == pytest.approx([1.0, 3.0])


def test_a_request_that_cannot_fit_is_refused_and_not_waited_for() -> None:
    one = offline(2_000)
    served = one.run(jobs((0.0, 3000, 2), (0.0, 1000, 1)))
    assert ttfts(served) == [None, pytest.approx(1.0)]
    assert one.contexts == []
    assert one.prompts_ahead(1.5) == 0


def test_what_is_ahead_of_a_prompt() -> None:
    one = offline()
    one.add(Served(jobs((0.0, 1000, 1))[0]), 0.0)
    assert one.prompts_ahead(0.0) == pytest.approx(1.0)
    one.advance(0.4)  # a forward of 500 tokens runs until 0.5
    assert one.prompts_ahead(0.4) == pytest.approx(0.6)
    assert one.contexts == [1000]
    one.finish()
    assert one.prompts_ahead(2.0) == 0
    assert one.contexts == []


def test_a_fleet_sends_a_prompt_where_it_waits_least() -> None:
    """The third comes when 0.8 s are left at the first replica, 2 s at the second."""
    fleet = Fleet([offline(), offline()], flat(), load_commits())
    come: list[int] = []
    served = fleet.run(jobs((0.0, 1000, 1), (0.1, 2100, 1), (0.2, 100, 1)), come.append)
    assert ttfts(served) == pytest.approx([1.0, 2.1, 0.9])
    assert come == [1, 2, 3]


def test_a_fleet_looks_for_room_first() -> None:
    """The second pool is free for the long prompt, though answers alone run at the first."""
    fleet = Fleet([offline(5_000), offline(5_000)], flat(), load_commits())
    served = fleet.run(jobs((0.0, 2000, 101), (0.0, 2500, 1), (2.2, 4000, 1)))
    assert ttfts(served) == pytest.approx([2.0, 2.5, 0.3 + 4.0], abs=0.01)


def test_who_has_no_room_waits_at_the_gateway_and_is_overtaken() -> None:
    """The third fits no pool until the first ends at 3 s; the fourth fits beside the first."""
    fleet = Fleet([offline(5_000), offline(5_000)], flat(), load_commits())
    served = fleet.run(jobs((0.0, 3000, 1), (0.0, 3500, 1), (0.1, 3000, 1), (0.2, 1000, 1)))
    assert ttfts(served) == pytest.approx([3.0, 3.5, 6.9, 3.8])


def test_who_waits_is_overtaken_a_number_of_times() -> None:
    """Of forty short prompts that would fit beside the first one, the gateway lets 32 pass."""
    fleet = Fleet([offline(40_000, 64)], flat(), load_commits())
    rows = [(0.0, 30_000, 1), (0.1, 25_000, 1)]
    served = fleet.run(jobs(*rows, *[(0.2 + 0.1 * n, 10, 1) for n in range(40)]))
    ends = [one.job.at + (one.ttft or 0.0) for one in served]
    assert ends[0] == pytest.approx(30)
    assert sum(end < 31 for end in ends[2:]) == 32
    assert min(ends[34:]) >= ends[1] > 55
