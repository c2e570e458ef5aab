"""The books of a replica: what is reserved, what is given back, and what the replica reports."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.gateway.replicas.budget import Need, ReplicaBudget, Reservation, Rules
from longleaf.gateway.replicas.facts import ReplicaLimits
from longleaf.gateway.replicas.loads import DecodeMoments, LoadReport

RULES = Rules(max_prefill_tokens=8_000, short_prompt_tokens=1_000)
LIMITS = ReplicaLimits(20_000, 9_990, 10_000, max_running_requests=4, tree_nodes=17)
QUIET = LoadReport(0, 0, 0, 10_000, 4, None, 0, 0.0, None)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def budget(rules: Rules = RULES, clock: Clock | None = None) -> ReplicaBudget:
    books = ReplicaBudget(rules, clock=clock or Clock())
    books.set_limits(LIMITS)
    return books


def need(tokens: int, prompt: int = 10, sequences: int = 1) -> Need:
    return Need(tokens, prompt, prompt, sequences)


def test_pool_is_shared_out_and_given_back() -> None:
    books = budget()
    first = books.reserve(need(6_000))
    assert books.free_tokens == 4_000
    assert books.obstacle(need(4_000)) is None
    assert books.obstacle(need(4_001)) == "kv_pool"
    first.release()
    first.release()
    assert (books.free_tokens, books.held, books.kv_tokens) == (10_000, 0, 0)


def test_whoever_is_alone_may_start() -> None:
    books = budget()
    assert books.obstacle(need(10_017, prompt=9_000)) is None
    books.report(replace(QUIET, running=4, used_tokens=9_000), frozenset())
    assert books.obstacle(need(5_000)) is None


def test_sequences_are_bounded() -> None:
    books = budget()
    books.reserve(need(10, sequences=3))
    assert books.obstacle(need(10, sequences=1)) is None
    assert books.obstacle(need(10, sequences=2)) == "sequences"
    full = [books.full]
    fourth = books.reserve(need(10))
    full.append(books.full)
    assert books.obstacle(need(1, prompt=1)) == "sequences"
    fourth.release()
    assert [*full, books.full] == [False, True, False]


def test_one_that_only_others_fill_is_not_full() -> None:
    """Whoever would be alone of ours may always start."""
    books = budget()
    books.report(replace(QUIET, running=4), frozenset())
    assert not books.full
    assert books.obstacle(need(10)) is None


def test_what_others_use_counts_until_they_are_gone() -> None:
    books = budget()
    ours = books.reserve(need(3_000))
    books.report(replace(QUIET, running=2, waiting=1, used_tokens=5_000), frozenset({ours}))
    assert (books.external_tokens, books.free_tokens, books.batch) == (2_000, 5_000, 3)
    assert books.obstacle(need(10, sequences=2)) == "sequences"
    books.report(replace(QUIET, running=1, used_tokens=1_000), frozenset({ours}))
    assert (books.external_tokens, books.free_tokens, books.batch) == (0, 7_000, 1)


def test_what_ended_while_the_replica_was_asked_is_not_taken_for_anothers() -> None:
    books = budget()
    ours = books.reserve(need(3_000))
    asked = books.snapshot()
    ours.release()
    late = books.reserve(need(500))
    books.report(replace(QUIET, running=1, used_tokens=3_000), asked)
    assert books.external_tokens == 0
    late.release()
    assert books.free_tokens == 10_000


def test_a_report_of_a_smaller_pool_counts_at_once() -> None:
    books = budget()
    books.report(replace(QUIET, capacity_tokens=2_000, max_running=1), frozenset())
    assert (books.capacity, books.max_sequences) == (2_000, 1)
    books.set_limits(replace(LIMITS, max_total_num_tokens=1_500))
    assert books.capacity == 1_500  # the report was the old engine's


def test_long_prompts_go_one_by_one_and_short_ones_beside_them() -> None:
    books = budget(Rules(max_prefill_tokens=2_000, short_prompt_tokens=1_000))
    long = books.reserve(need(5_000, prompt=4_900))  # longer than the limit, but alone
    assert books.obstacle(need(1_100, prompt=1_001)) == "prefill"
    assert books.obstacle(need(900, prompt=800)) is None
    books.reserve(need(900, prompt=800))
    books.reserve(need(900, prompt=800))
    assert books.obstacle(need(900, prompt=401)) == "prefill"
    assert books.obstacle(need(900, prompt=400)) is None
    assert books.prefill_tokens == 6_500
    long.prefilled()
    long.prefilled()
    assert books.prefill_tokens == 1_600
    assert books.obstacle(need(1_100, prompt=1_001)) is None
    long.release()
    assert books.prefill_tokens == 1_600


def test_prefill_of_a_whole_answer_ends_by_report() -> None:
    """Not streamed, a first token is not seen: two reports with only decode steps between."""
    books = budget()
    whole = books.reserve(need(5_000, prompt=4_000))
    steps = DecodeMoments(10, 10, 0.1, 10, 0.1, 10)
    first = replace(QUIET, running=1, prefilled_tokens=500, decode=steps)
    books.report(first, frozenset({whole}))
    still = replace(first, prefilled_tokens=4_000, decode=replace(steps, steps=12, batch=12))
    books.report(still, frozenset({whole}))
    assert books.prefill_tokens == 4_000
    late = books.reserve(need(10))
    only_decoded = replace(still, decode=replace(steps, steps=20, batch=20))
    books.report(only_decoded, frozenset({whole, late}))
    assert (whole.prefilling, late.prefilling) == (False, True)  # late may have come after it
    assert books.prefill_tokens == 10


def test_predictions_that_break_the_slo_wait() -> None:
    books = budget(Rules(8_000, 1_000, tpot=0.02, ttft=1.0))
    for batch in (1.0, 2.0, 3.0, 4.0) * 20:
        books.steps.observe(context=0, batch=batch, step=0.005 * batch)
    running = books.reserve(need(1_000, prompt=100, sequences=3))
    assert books.obstacle(need(100)) is None  # four sequences: 20 ms
    tight = budget(Rules(8_000, 1_000, tpot=0.0199))
    tight.steps = books.steps
    tight.reserve(need(1_000, sequences=3))
    assert tight.obstacle(need(100)) == "tpot"
    moments = DecodeMoments(1, 1, 0.01, 1, 0.01, 1)
    books.report(replace(QUIET, running=1, decode=moments), frozenset())
    books.report(replace(QUIET, running=1, prefilled_tokens=500, prefill_seconds=1.0), frozenset())
    assert books.steps.prefill_rate == 500
    assert books.obstacle(need(500, prompt=401)) == "ttft"  # behind 100 tokens: 501 in all
    assert books.obstacle(need(500, prompt=400)) is None
    running.prefilled()
    assert books.obstacle(need(900, prompt=800)) is None


def test_drain_rate_counts_busy_time_only() -> None:
    clock = Clock()
    books = budget(clock=clock)
    assert books.seconds_until_free(20_000, 1) is None
    assert books.seconds_until_turn(0) is None
    for _ in range(30):
        reservation = books.reserve(need(1_000))
        clock.now += 2.0
        reservation.prefilled()
        reservation.release()
        clock.now += 50.0  # nobody was there: says nothing about speed
    books.reserve(need(9_000))
    # 500 tokens a second; 9,500 wanted, 1,000 free.
    assert books.seconds_until_free(9_500, 1) == pytest.approx(17.0, rel=0.02)
    # Half a sequence a second; four wanted, three free.
    assert books.seconds_until_free(10, 4) == pytest.approx(2.0, rel=0.02)
    # The replica itself is full: three wait there, and one more.
    assert books.seconds_until_turn(3) == pytest.approx(8.0, rel=0.02)
    for _ in range(50):  # refused by the replica: no work was done
        books.reserve(need(100)).release()
    assert books.seconds_until_turn(3) == pytest.approx(8.0, rel=0.02)


OPERATION = st.one_of(
    st.tuples(
        st.just("reserve"),
        st.integers(1, 12_000),
        st.integers(1, 9_000),
        st.integers(1, 4),
    ),
    st.tuples(st.sampled_from(["release", "prefilled"]), st.integers(0, 30)),
    st.tuples(
        st.just("report"),
        st.integers(0, 12_000),
        st.integers(0, 6),
        st.integers(0, 3),
        st.integers(0, 5_000),
    ),
    st.tuples(st.just("ask")),
    st.tuples(st.just("shrink"), st.integers(16, 20_000)),
    st.tuples(st.just("time"), st.floats(0, 1e4)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATION, max_size=60))
def test_reservations_never_leak_or_go_negative(operations: list[tuple[object, ...]]) -> None:
    clock = Clock()
    books = budget(clock=clock)
    made: list[Reservation] = []
    asked = books.snapshot()
    prefilled, steps = 0, 1
    for operation in operations:
        match operation:
            case ("reserve", int(tokens), int(prompt), int(sequences)):
                wanted = Need(tokens, prompt, prompt * sequences, sequences)
                free = books.free_tokens
                if books.obstacle(wanted) is None:
                    assert not books.held or (free is not None and tokens <= free)
                    made.append(books.reserve(wanted))
            case ("release", int(index)) if made:
                made[index % len(made)].release()
            case ("prefilled", int(index)) if made:
                made[index % len(made)].prefilled()
            case ("ask",):
                asked = books.snapshot()
            case ("report", int(used), int(running), int(waiting), int(tokens)):
                prefilled, steps = prefilled + tokens, steps + 1
                books.report(
                    LoadReport(
                        running=running,
                        waiting=waiting,
                        used_tokens=used,
                        capacity_tokens=None,
                        max_running=None,
                        bytes_per_token=None,
                        prefilled_tokens=prefilled,
                        prefill_seconds=prefilled / 1e3,
                        decode=DecodeMoments(steps, steps, steps * 0.01, steps, steps, steps),
                    ),
                    asked,
                )
            case ("shrink", int(capacity)):
                books.set_limits(replace(LIMITS, max_total_num_tokens=capacity))
            case ("time", float(seconds)):
                clock.now += seconds
        held = [reservation for reservation in made if not reservation.released]
        assert books.held == len(held)
        assert books.kv_tokens == sum(one.need.kv_tokens for one in held)
        assert books.sequences == sum(one.need.sequences for one in held)
        assert books.context_tokens == sum(one.need.context_tokens for one in held)
        assert books.prefill_tokens == sum(
            one.need.prefill_tokens for one in held if one.prefilling
        )
        assert min(books.short_prefill_tokens, books.long_prefill_tokens) >= 0
        assert books.external_tokens >= 0
        assert (books.free_tokens or 0) >= 0
        wait = books.seconds_until_free(5_000, 1)
        assert wait is None or wait >= 0
    for reservation in made:
        reservation.release()
    sums = (books.held, books.kv_tokens, books.sequences, books.context_tokens)
    assert (*sums, books.prefill_tokens) == (0, 0, 0, 0, 0)
