"""The verdicts of the commit probe: what each run of figures must be called, and why."""

from typing import Any

import pytest

from longleaf.probes.accounting import Totals
from longleaf.probes.judge import Cell, Judgement, Verdict, judge

CONTEXTS = (1024, 16_384, 65_536)
HIGH, LOW = [7.9, 7.8, 7.5], [7.9, 7.8, 1.2]


def cells(**rows: list[Any]) -> list[Cell]:
    """Of each text a sample, or a list of samples, at 1k, 16k and 64k."""
    return [
        Cell(text, context, found if isinstance(found, list) else [found])
        for text, row in rows.items()
        for context, found in zip(CONTEXTS, row, strict=False)
    ]


def judged(**rows: list[Any]) -> Judgement:
    return judge(cells(**rows), Totals())


def test_verdicts() -> None:
    assert judged(predictable=HIGH, prose=HIGH).verdict is Verdict.HEALTHY
    text = judged(predictable=HIGH, prose=[1.1, 1.0, 1.0])
    assert text.verdict is Verdict.TEXT
    assert "predictable 7.90 at 1k, 7.80 at 16k, 7.50 at 64k; prose 1.10 at 1k" in text.words
    context = judged(predictable=LOW, prose=LOW)
    assert (context.verdict, context.cause) == (Verdict.CONTEXT, "window or positions")
    assert "past 16k and up to 64k" in context.words
    assert judged(predictable=LOW, prose=[1.1, 1.0, 1.0]).verdict is Verdict.BOTH
    assert judge([Cell("predictable", 1024, why="refused")], Totals()).verdict is Verdict.UNKNOWN
    assert judge([], Totals()).verdict is Verdict.UNKNOWN
    assert {verdict for verdict in Verdict if verdict.passed} == {Verdict.HEALTHY, Verdict.TEXT}


def test_the_reference_is_predictable_text_in_any_order() -> None:
    texts = {"prose": [5.0, 4.9, 5.1], "predictable": [7.5, 7.5, 7.5]}
    forward, backward = judged(**texts), judged(**dict(reversed(texts.items())))
    assert forward.verdict is backward.verdict is Verdict.TEXT
    alone = judged(prose=[2.1, 2.0, 2.0])
    assert (alone.verdict, alone.verdict.passed) == (Verdict.UNKNOWN, False)
    assert "No predictable text was measured" in alone.words


def test_every_text_is_judged_along_the_context() -> None:
    found = judged(predictable=[8, 8, 8], code=[7, 6, 1.0], prose=[7, 6, 1.0])
    assert (found.verdict, found.cause) == (Verdict.CONTEXT, "far context")
    assert "code 7.00 at 1k, 6.00 at 16k, 1.00 at 64k" in found.words
    every = judged(predictable=[[8] * 3] * 3, code=[[7, 6, 7], [6, 6, 6], [2.9, 2.5, 2.7]])
    assert every.verdict is Verdict.CONTEXT


@pytest.mark.parametrize(
    "code",
    [
        [4.2, 2.6, 2.6],
        [5.73, 3.0, 2.1],  # a sample each: what a sound engine gives
        [[4.2, 3.0, 5.2], [2.1, 3.0, 4.2], [2.2, 3.7, 4.5]],
        [2.2, 1.0, 1.0],
    ],
)
def test_what_a_text_varies_by_itself_is_no_fault_of_the_context(code: list[Any]) -> None:
    assert judged(predictable=[7.9, 7.9, 7.9], code=code).verdict is Verdict.TEXT


def test_the_least_sample_counts() -> None:
    one = judged(predictable=[[8, 8, 8], [8, 8, 8], [8, 8, 1.0]])
    assert one.verdict is Verdict.CONTEXT
    assert "5.67 at 64k (1.00 to 8.00)" in one.words
    short = judged(predictable=[[8, 8, 1.0], [8, 8, 8], [8, 8, 8]])
    assert (short.verdict, short.cause) == (Verdict.ENGINE, "unsteady")
    assert judged(predictable=[[8, 8, 4.9], [8, 8, 4.9]]).verdict is Verdict.HEALTHY


def test_the_best_context_is_the_measure_not_the_shortest() -> None:
    short = judged(predictable=[3, 8, 8])
    assert (short.verdict, short.cause) == (Verdict.ENGINE, "unsteady")
    assert "predictable 3.00 at 1k, 8.00 at 16k" in short.words
    assert judged(predictable=[6, 8, 5.5]).verdict is Verdict.CONTEXT


def test_what_was_not_measured_is_never_a_pass() -> None:
    for lost in (0, 2, 4):
        found = cells(predictable=HIGH, prose=HIGH)
        found[lost].samples, found[lost].why = [], "status 400: too long"
        said = judge(found, Totals())
        assert (said.verdict, said.cause) == (Verdict.UNKNOWN, "not measured")
        assert "status 400: too long" in said.words
    some = cells(predictable=HIGH)
    some[1].why = "the second of its seeds was refused"
    assert judge(some, Totals()).verdict is Verdict.UNKNOWN
    # A fault that shows is not hidden by it.
    faulty = cells(predictable=LOW)
    faulty[1].samples = []
    assert judge(faulty, Totals()).verdict is Verdict.CONTEXT


def test_one_context_says_nothing_of_others() -> None:
    said = judged(predictable=[8.0], prose=[2.0])
    assert said.verdict is Verdict.TEXT
    assert "One context only" in said.words
    assert "does not matter" not in said.words


def span(short: float, long: float) -> dict[str, float]:
    family = "longleaf_drafter_span_tokens"
    metrics = {f"{family}_count@1k": 900.0, f"{family}_sum@1k": 900 * short}
    return metrics | {f"{family}_count@64k": 10.0, f"{family}_sum@64k": 10 * long}


def test_a_window_is_judged_by_the_bucket_where_most_is_read() -> None:
    """Many drafts at short contexts must not hide what happens at long ones."""
    totals = Totals(metrics=span(800, 60_000), window=2047)
    found = judge(cells(predictable=HIGH), totals)
    assert (found.verdict, found.cause) == (Verdict.CONTEXT, "window ignored")
    totals.window = 60_000
    assert judge(cells(predictable=HIGH), totals).verdict is Verdict.HEALTHY


def test_positions_are_named_alone_only_where_the_window_is_known_to_hold() -> None:
    held = judge(cells(predictable=LOW), Totals(metrics=span(800, 2047), window=2047))
    assert held.cause == "draft positions"
    assert "The window holds (2047 of 2047 rows)" in held.words
    unknown = judged(predictable=LOW)
    assert "window is ignored or the draft KV's rotary positions are wrong" in unknown.words
    assert "window was not checked (no metrics)" in judged(predictable=HIGH).words


def drafting(commit_len: float, proposed: int, correct: int) -> Judgement:
    """100 steps in one answer."""
    tokens = round(100 * commit_len)
    totals = Totals(100, tokens, 100, 1, tokens, correct, proposed)
    return judge(cells(predictable=[commit_len] * 3), totals)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (drafting(1.0, 700, 0), "accept commits one"),
        (drafting(1.5, 700, 50), "draft KV missing"),
        (drafting(1.0, 0, 0), "nothing drafted"),
        (drafting(1.95, 100, 95), ""),  # --speculative-budget 1
        (drafting(1.4, 100, 40), "draft KV missing"),
        (drafting(2.9, 200, 190), ""),
    ],
)
def test_the_threshold_is_of_what_is_drafted(found: Judgement, cause: str) -> None:
    assert found.cause == cause
    assert found.verdict is (Verdict.ENGINE if cause else Verdict.HEALTHY)
    assert "though some drafts" not in found.words


@pytest.mark.parametrize(
    ("totals", "said"),
    [
        (Totals(steps=10, committed=40, reported=20, answers=1), "2.00 tokens a step"),
        (Totals(10, 40, 11, 1, 40, correct_drafts=60), "60 accepted drafts and 10 bonus"),
        (Totals(10, 40, 30, 1, 40), "30 events came of 10 steps"),
        (Totals(10, 40, 10, 1, float("nan")), "nan tokens a step"),
    ],
)
def test_answers_that_contradict_themselves(totals: Totals, said: str) -> None:
    found = judge(cells(predictable=HIGH), totals)
    assert (found.verdict, found.cause) == (Verdict.METRICS, "metrics count wrong")
    assert said in found.words


@pytest.mark.parametrize(
    ("count", "total", "depth", "verdict", "cause"),
    [
        (30, 240, 210, Verdict.HEALTHY, ""),
        (90, 700, 610, Verdict.HEALTHY, ""),  # others are served meanwhile
        (0, 0, 0, Verdict.METRICS, "metrics miss steps"),
        (15, 120, 105, Verdict.METRICS, "metrics miss steps"),  # of one replica of two
        (30, 240, 300, Verdict.METRICS, "metrics count wrong"),
        (15, 240, 225, Verdict.METRICS, "metrics count wrong"),  # the tokens are all there
        (-95, -760, -665, Verdict.UNKNOWN, "engine restarted"),
    ],
)
def test_what_metrics_count_beside_the_answers(
    count: float, total: float, depth: float, verdict: Verdict, cause: str
) -> None:
    metrics = {
        "longleaf_commit_len_count": float(count),
        "longleaf_commit_len_sum": float(total),
        "longleaf_accepted_depth_sum": float(depth),
    }
    totals = Totals(30, 240, 30, 3, 240.0, metrics=metrics)
    found = judge(cells(predictable=[8.0, 8.0, 8.0]), totals)
    assert (found.verdict, found.cause) == (verdict, cause)
    if cause == "metrics miss steps":
        assert f"{count} steps and {total} tokens, answers 30 and 240" in found.words
        assert "other replicas" in found.words
        assert "Trust none" not in found.words


def test_an_engine_that_tells_no_window_is_not_said_to_keep_one() -> None:
    """SGLang without a draft window: its drafter read 16.6k rows at 16k, and all was healthy."""
    span = "longleaf_drafter_span_tokens"
    metrics = {f"{span}_sum@32k": 1_357_898.0, f"{span}_count@32k": 82.0}
    found = judge(cells(predictable=HIGH), Totals(metrics=metrics))
    assert found.verdict is Verdict.HEALTHY
    assert found.words.endswith("window was not checked (the engine tells none).")
    assert (
        "not checked"
        not in judge(cells(predictable=HIGH), Totals(metrics=metrics, window=2e4)).words
    )
