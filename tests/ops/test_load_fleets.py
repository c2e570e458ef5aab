import pytest

from longleaf.simulate.curve import load_curve
from longleaf_load.records import Record
from longleaf_load.slo import parse_slo
from ops.bench.load_fleets import capacity, steady_work

CURVE = load_curve("h200-ddtree")


def record(sent: float, seconds: float, ttft: float = 0.5, outcome: str = "ok") -> Record:
    return Record(
        arrival=0,
        phase=0,
        turn=1,
        attempt=1,
        text="prose",
        prompt_tokens=16_384,
        max_tokens=200,
        document=None,
        sent=sent,
        late=0.0,
        outcome=outcome,
        ttft=ttft,
        tpot=0.01,
        seconds=seconds,
        steps=60,
    )


def test_work_counts_where_it_ended_in_a_phase_s_second_half() -> None:
    """Phases of 20 and 10 s: 10 to 20 and 25 to 30 count."""
    records = [
        record(0.0, 9.9),
        record(9.0, 1.0),
        record(12.0, 7.9),
        record(19.0, 3.0),
        record(19.0, 6.0),
        record(29.0, 1.5),
        record(13.0, 1.0, outcome="refused"),
        record(13.0, 1.0, ttft=3.0),
    ]
    one = CURVE.prompt_seconds(16_384) + 60 * CURVE.step_seconds([16_484] * 8) / 8
    done = steady_work(records, parse_slo(["ttft_ms=2000"]), [20.0, 10.0])
    assert done == pytest.approx([2 * one, one])


def test_capacity_is_what_its_mix_takes_of_a_second() -> None:
    """Half the prompts have 2k tokens, 6 of 100 have 185k: a second's prefill bounds it above."""
    shares = {2_048: 0.5, 16_384: 0.3, 65_536: 0.14, 185_000: 0.06}
    prefill = sum(share * CURVE.prompt_seconds(tokens) for tokens, share in shares.items())
    assert 0.5 / prefill < capacity() < 1.0 / prefill
