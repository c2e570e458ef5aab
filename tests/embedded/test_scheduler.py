"""Nobody waits for ever, nothing leaks, and a fault stays where it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from longleaf.ddtree import SamplingParams
from longleaf.embedded.drafter import Drafter
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import SchedulerOptions, SpeculativeOptions
from longleaf.embedded.request import Finish, FinishKind, GenerationRequest
from longleaf.embedded.slots import SlotError
from longleaf.embedded.target import I64, Segment, Target, TargetOutput
from longleaf.embedded.weights import F32

from .conftest import MakeBench

Ask = Callable[..., GenerationRequest]
POISON = 4000


class FaultyTarget(Target):
    """The target, but a forward raises, or gives NaN, when a segment holds the poison token."""

    def __init__(self, real: Target, nan: bool, poison: int) -> None:
        self.__dict__.update(real.__dict__)
        self.nan = nan
        self.poison = poison

    def forward(self, segments: Sequence[Segment], pool: KvPool) -> TargetOutput:
        output = super().forward(segments, pool)
        start = 0
        for segment in segments:
            end = start + len(segment.tokens)
            if self.poison in segment.tokens:
                if not self.nan:
                    raise RuntimeError("poisoned")
                output.hidden[start:end] = np.nan
            start = end
        return output


class FaultyDrafter(Drafter):
    """The drafter, but its K/V cannot be extended at or past a position."""

    def __init__(self, real: Drafter, limit: int) -> None:
        self.__dict__.update(real.__dict__)
        self.limit = limit

    def extend(self, features: F32, positions: I64, slots: I64, pool: KvPool) -> None:
        if positions[-1] >= self.limit:
            raise RuntimeError("no draft K/V")
        super().extend(features, positions, slots, pool)


def faulty(nan: bool = False, poison: int = POISON) -> Callable[[LoadedModels], LoadedModels]:
    def edit(models: LoadedModels) -> LoadedModels:
        target = FaultyTarget(models.models.target, nan, poison)
        return replace(models, models=replace(models.models, target=target))

    return edit


def error(bench_finish: Finish | None) -> Finish:
    assert bench_finish is not None
    assert bench_finish.kind is FinishKind.ERROR
    return bench_finish


def test_requests_run_together(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    requests = [ask([10 + i, 20, 30], speculative=False, max_tokens=21) for i in range(4)]
    bench.complete(*requests)
    moments = bench.scheduler.snapshot().decode_moments
    assert moments is not None
    steps, batch, _, squares, _, tokens = moments
    assert (steps, batch, squares, tokens) == (20, 80, 320, 80)


def test_running_requests_are_limited(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(max_running_requests=2)
    for i in range(5):
        bench.add(ask([i + 1]))
    bench.scheduler.step()
    snapshot = bench.scheduler.snapshot()
    assert (snapshot.num_running_reqs, snapshot.num_waiting_reqs) == (2, 3)
    assert snapshot.num_waiting_uncached_tokens == 3
    assert snapshot.num_total_tokens == snapshot.num_used_tokens + 3
    bench.run()


def test_a_long_prompt_does_not_stop_a_running_answer(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(chunked_prefill_size=32)
    short = ask([1, 2, 3], max_tokens=60, speculative=False)
    bench.add(short)
    bench.scheduler.step()
    bench.add(ask(list(range(10, 330))))
    seen = len(bench.events[short.rid])
    for _ in range(10):
        bench.scheduler.step()
        assert len(bench.events[short.rid]) == seen + 1
        seen += 1
    assert bench.scheduler.snapshot().total_prefill_uncached_tokens == 3 + 320
    bench.run()


def test_prompts_share_the_chunk_of_a_step(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(chunked_prefill_size=32)
    for first in (1, 2, 3):
        bench.add(ask([first, *range(100, 119)], max_tokens=2))
    computed = []
    while not bench.scheduler.idle:
        bench.scheduler.step()
        computed.append(bench.scheduler.snapshot().total_prefill_uncached_tokens)
    assert computed[:2] == [32, 60]


def test_an_abort_frees_everything_before_the_next_step(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(chunked_prefill_size=64, max_running_requests=2)
    decoding = ask([1, 2, 3], max_tokens=500)
    prefilling = ask(list(range(10, 400)), max_tokens=10)
    waiting = ask([9], max_tokens=10)
    for request in (decoding, prefilling, waiting):
        bench.add(request)
    for _ in range(3):
        bench.scheduler.step()
    assert not bench.events[prefilling.rid]
    used = bench.owners()[0]
    assert used > 64
    for request in (prefilling, waiting, decoding):
        bench.scheduler.cancel(request)
        last = bench.events[request.rid][-1]
        assert last.finish == Finish(FinishKind.ABORT)
    assert bench.owners()[0] == 0
    assert bench.scheduler.idle
    # What had been computed can be used again.
    again = bench.complete(ask(list(range(10, 400)), max_tokens=2))[0]
    assert 64 <= again.usage.cached_tokens <= 192


def test_abort_by_prefix(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    for rid in ("job-1", "job-2", "other"):
        bench.add(ask([5], rid=rid, max_tokens=50))
    bench.scheduler.step()
    bench.scheduler.abort("job-")
    assert [bench.events[rid][-1].finish for rid in ("job-1", "job-2", "other")] == [
        Finish(FinishKind.ABORT),
        Finish(FinishKind.ABORT),
        None,
    ]
    bench.run()
    assert bench.answer("other").finish == Finish(FinishKind.LENGTH)
    bench.scheduler.abort("nobody")


def test_a_full_pool_makes_requests_wait(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(max_total_tokens=256)
    requests = [ask(list(range(100 * i, 100 * i + 100)), max_tokens=60) for i in range(1, 6)]
    for request in requests:
        bench.add(request)
    waited = False
    while not bench.scheduler.idle:
        bench.scheduler.step()
        waited = waited or bench.scheduler.snapshot().num_waiting_reqs > 0
        bench.owners()
    assert waited
    for request in requests:
        assert len(bench.answer(request.rid).tokens) == 60


def test_first_come_is_first_served_however_tight_the_pool(make_bench: MakeBench, ask: Ask) -> None:
    """Six equal answers that do not fit together end in the order in which they came."""
    bench = make_bench(max_total_tokens=160, decode_headroom=0)
    requests = [ask([first] * 10, max_tokens=60, speculative=False) for first in range(1, 7)]
    for request in requests:
        bench.add(request)
    ended: list[str] = []
    retracted = 0
    while not bench.scheduler.idle:
        bench.scheduler.step()
        retracted += bench.scheduler.snapshot().num_retracted_reqs
        ended += [r.rid for r in requests if r.rid not in ended and bench.has_ended(r.rid)]
    assert retracted > 0
    assert ended == [request.rid for request in requests]
    assert {bench.answer(r.rid).usage.cached_tokens for r in requests} == {0}


def test_a_running_answer_is_not_given_up_for_a_newer_prompt(
    make_bench: MakeBench, ask: Ask
) -> None:
    """The prompt's last chunks find that the answer has grown into their room: they wait."""
    bench = make_bench(max_total_tokens=104, decode_headroom=0, chunked_prefill_size=8)
    older = ask([1] * 8, max_tokens=60, speculative=False)
    newer = ask(list(range(100, 190)), max_tokens=5, speculative=False)
    bench.add(older)
    bench.scheduler.step()
    bench.add(newer)
    retracted = 0
    while not bench.has_ended(older.rid):
        seen = len(bench.events[older.rid])
        bench.scheduler.step()
        assert len(bench.events[older.rid]) == seen + 1
        retracted += bench.scheduler.snapshot().num_retracted_reqs
    assert retracted > 0
    bench.run()
    assert len(bench.answer(newer.rid).tokens) == 5


def test_headroom_keeps_answers_from_being_retracted(make_bench: MakeBench, ask: Ask) -> None:
    """Each answer may need 70 slots, and a tree as many again as its budget and root."""
    bench = make_bench(SpeculativeOptions(budget=4), max_total_tokens=160, decode_headroom=60)
    for first in range(1, 5):
        bench.add(ask([first] * 10, max_tokens=60))
    most = 0
    while not bench.scheduler.idle:
        bench.scheduler.step()
        snapshot = bench.scheduler.snapshot()
        most = max(most, snapshot.num_running_reqs)
        assert snapshot.num_retracted_reqs == 0
    assert most == 2


def test_a_retracted_request_keeps_its_rows_while_there_is_room(
    make_bench: MakeBench, ask: Ask
) -> None:
    bench = make_bench(max_total_tokens=128, decode_headroom=0)
    for first in (1, 2):
        bench.add(ask([first] * 20, max_tokens=80, speculative=False))
    while not bench.scheduler.snapshot().num_retracted_reqs:
        bench.scheduler.step()
    used, cached, free = bench.owners()
    # Both have grown alike, and the pool was full: what the newer one had is cached, not lost.
    assert 60 <= used <= 66
    assert free <= 128 // 10 + 1  # what gives way at once
    assert cached == 128 - used - free
    bench.run()


def test_the_longest_request_that_is_accepted_runs(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(max_total_tokens=64)
    limits = SchedulerOptions(context_length=1024, max_total_tokens=64)
    assert (limits.max_request_len, limits.max_input_len) == (63, 58)
    fits = bench.complete(ask(list(range(1, 58)), max_tokens=None))[0]
    assert (len(fits.tokens), fits.finish) == (5, Finish(FinishKind.LENGTH))
    small = bench.complete(ask([7], max_tokens=10_000))[0]
    assert len(small.tokens) == 63 - 1 - 1
    refused = bench.complete(ask(list(range(1, 59))))[0]
    assert error(refused.finish).status == 400
    assert error(refused.finish).message == (
        "Input length (58 tokens) exceeds the maximum allowed length (58 tokens). "
        "Use a shorter input or enable --allow-auto-truncate."
    )


def test_a_full_queue_refuses(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(max_running_requests=2, max_queued_requests=1)
    requests = [ask([i + 1], max_tokens=5) for i in range(5)]
    for request in requests:
        bench.add(request)
    refused = [bench.events[request.rid] for request in requests]
    assert [len(events) for events in refused] == [0, 0, 0, 1, 1]
    finish = error(refused[3][0].finish)
    assert (finish.status, finish.message) == (503, "The request queue is full.")
    bench.run()
    assert [len(bench.answer(r.rid).tokens) for r in requests] == [5, 5, 5, 0, 0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "The prompt is empty."),
        ([1, 4096], "ids outside 0..4095"),
        ([-1], "ids outside 0..4095"),
    ],
)
def test_bad_prompts(make_bench: MakeBench, ask: Ask, prompt: list[int], message: str) -> None:
    event = make_bench().complete(ask(prompt))[0]
    assert message in error(event.finish).message


def test_an_id_belongs_to_one_running_request(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    first, second = ask([1], rid="same"), ask([2], rid="same")
    bench.add(first)
    bench.add(second)
    assert "'same' is still running" in error(bench.events["same"][0].finish).message
    bench.scheduler.cancel(second)
    bench.run()
    assert bench.events["same"][-1].finish == Finish(FinishKind.LENGTH)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 13])
def test_max_tokens_is_never_overshot(make_bench: MakeBench, ask: Ask, tokens: int) -> None:
    bench = make_bench()
    answer = bench.complete(ask("1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5,", max_tokens=tokens))[0]
    assert len(answer.tokens) == tokens
    assert answer.usage.completion_tokens == tokens == 1 + answer.usage.spec.committed
    assert answer.finish == Finish(FinishKind.LENGTH)


def test_stops(make_bench: MakeBench, ask: Ask, loaded: LoadedModels) -> None:
    bench = make_bench()
    full = bench.complete(ask("Once upon a time", max_tokens=40))[0]
    token = full.tokens[20]
    first = full.tokens.index(token)
    by_id = bench.complete(ask("Once upon a time", max_tokens=40, stop_token_ids={token}))[0]
    assert by_id.tokens == full.tokens[: first + 1]
    assert by_id.finish == Finish(FinishKind.STOP, matched=token)
    assert by_id.usage.completion_tokens == first + 1 == 1 + by_id.usage.spec.committed

    middle = len(full.text) // 2
    stop = full.text[middle : middle + 5]
    for keep, end in ((False, 0), (True, len(stop))):
        answer = bench.complete(
            ask("Once upon a time", max_tokens=40, stop=(stop, "\x00"), keep_stop=keep)
        )[0]
        assert answer.text == full.text[: full.text.index(stop) + end]
        assert answer.finish == Finish(FinishKind.STOP, matched=stop)
        assert answer.tokens == full.tokens[: len(answer.tokens)]
        assert answer.usage.completion_tokens == len(answer.tokens)


def test_an_end_token_ends_an_answer_unless_ignored(
    make_bench: MakeBench, ask: Ask, loaded: LoadedModels
) -> None:
    full = make_bench().complete(ask("Once upon a time", max_tokens=40))[0]
    end = full.tokens[20]

    def edit(models: LoadedModels) -> LoadedModels:
        return replace(models, models=replace(models.models, eos_ids=frozenset({end})))

    bench = make_bench(edit=edit)
    ended, ignored = bench.complete(
        ask("Once upon a time", max_tokens=40, ignore_eos=False),
        ask("Once upon a time", max_tokens=40, ignore_eos=True),
    )
    assert ended.tokens == full.tokens[: full.tokens.index(end) + 1]
    assert ended.finish == Finish(FinishKind.STOP, matched=end)
    assert ended.text == loaded.tokenizer.decode(ended.tokens[:-1])
    assert (ignored.tokens, ignored.finish) == (full.tokens, full.finish)


@pytest.mark.parametrize(
    ("options", "max_tokens", "drafted"),
    [
        (SpeculativeOptions(budget=16, topk=8), 40, 16),
        (SpeculativeOptions(budget=16, topk=8), 3, 8),  # one depth: the bonus is the last token
        (SpeculativeOptions(budget=16, topk=8), 2, 0),
        (SpeculativeOptions(budget=16, topk=1), 40, 7),
        (SpeculativeOptions(budget=16, topk=1, block=4), 40, 3),
        (SpeculativeOptions(budget=2, topk=8), 40, 2),
    ],
)
def test_trees_have_the_shape_that_is_asked_for(
    make_bench: MakeBench, ask: Ask, options: SpeculativeOptions, max_tokens: int, drafted: int
) -> None:
    bench = make_bench(options)
    request = ask([5, 6, 7], max_tokens=max_tokens)
    bench.add(request)
    bench.scheduler.step()  # prefill, then one decode step
    assert bench.events[request.rid][-1].usage.spec.proposed_drafts == drafted
    assert bench.events[request.rid][-1].usage.spec.steps == 1
    bench.run()


def test_text_is_the_tokens_text(make_bench: MakeBench, ask: Ask, loaded: LoadedModels) -> None:
    bench = make_bench()
    hot = SamplingParams(temperature=3.0)
    for seed in range(4):
        answer = bench.complete(ask([1], sampling=hot, seed=seed, max_tokens=60))[0]
        assert answer.text == loaded.tokenizer.decode(answer.tokens)


@pytest.mark.parametrize("nan", [False, True], ids=["raises", "nan"])
def test_a_failing_request_fails_alone(make_bench: MakeBench, ask: Ask, nan: bool) -> None:
    bench = make_bench(edit=faulty(nan))
    clean = make_bench()
    good = [ask([5, 6, 7], max_tokens=30), ask([8, 9], max_tokens=30, sampling=SamplingParams(1.0))]
    bad = ask([5, POISON, 7])
    answers = bench.complete(good[0], bad, good[1])
    finish = error(answers[1].finish)
    assert finish.status == 500
    assert ("not finite" if nan else "RuntimeError: poisoned") in finish.message
    assert answers[1].tokens == ()
    expected = clean.complete(*good)
    assert [answers[0].tokens, answers[2].tokens] == [event.tokens for event in expected]


def test_a_request_that_fails_while_decoding(make_bench: MakeBench, ask: Ask) -> None:
    """The poison is a token of one answer: its step fails, the others go on."""
    probe = make_bench()
    victim = ask([5, 6, 7], max_tokens=30, sampling=SamplingParams(3.0))
    others = [ask([8, 9], max_tokens=30), ask([40], max_tokens=30, speculative=False)]
    expected = probe.complete(victim, *others)
    tokens = expected[0].tokens
    elsewhere = {token for other in expected[1:] for token in other.tokens} | {0}
    at = next(i for i in range(3, 25) if tokens[i] not in {*tokens[:i], *elsewhere})
    poison = tokens[at]
    bench = make_bench(SpeculativeOptions(budget=1, topk=1), edit=faulty(poison=poison))
    answers = bench.complete(victim, *others)
    assert "poisoned" in error(answers[0].finish).message
    assert answers[0].tokens == expected[0].tokens[: len(answers[0].tokens)]
    assert at - 1 <= len(answers[0].tokens) <= at + 1
    assert [event.tokens for event in answers[1:]] == [event.tokens for event in expected[1:]]


def test_rows_without_draft_kv_are_not_cached(make_bench: MakeBench, ask: Ask) -> None:
    """A request that fails between its target rows and its draft rows leaves neither to others."""
    made: list[FaultyDrafter] = []

    def edit(models: LoadedModels) -> LoadedModels:
        assert models.models.drafter is not None
        made.append(FaultyDrafter(models.models.drafter, limit=20))
        return replace(models, models=replace(models.models, drafter=made[0]))

    bench = make_bench(edit=edit)
    victim = bench.complete(ask([5] * 12, max_tokens=40))[0]
    assert "no draft K/V" in error(victim.finish).message
    made[0].limit = 10_000
    turn = ask([5] * 12 + [*victim.tokens], max_tokens=4)
    assert bench.complete(turn)[0].usage.cached_tokens == 12  # published when prefill was through
    assert bench.check_cached_rows(turn.rid) == 12 + len(victim.tokens) + 3


def test_bytes_read_are_counted_row_by_row(make_bench: MakeBench, ask: Ask) -> None:
    """Layers times 576 floats a row; prefill reads its own rows, a step the prefix and its own."""
    bench = make_bench(chunked_prefill_size=8)
    bench.complete(ask(list(range(100, 120)), max_tokens=4, speculative=False))
    rows = (8 + 16 + 20) + (21 + 22 + 23)
    read = bench.registry.get_sample_value("longleaf_kv_read_bytes_total")
    row_bytes = bench.models.target.config.num_layers * 576 * 4
    assert read == rows * row_bytes
    # Of steps alone: the bytes of each verify forward beside its time.
    value = bench.registry.get_sample_value
    assert value("longleaf_timed_verify_kv_bytes_total") == (21 + 22 + 23) * row_bytes
    verify = {"phase": "verify", "context_bucket": "1k"}
    seconds = value("longleaf_timed_verify_seconds_total")
    assert seconds == pytest.approx(value("longleaf_step_seconds_sum", verify))


def test_of_a_batch_each_verify_is_timed_once(make_bench: MakeBench, ask: Ask) -> None:
    """Each request waits for the batch's verify; the bytes' time counts it once."""
    bench = make_bench()
    for first in (100, 200):
        bench.add(ask(list(range(first, first + 20)), max_tokens=4, speculative=False))
    while not bench.scheduler.idle:
        bench.scheduler.step()
    value = bench.registry.get_sample_value
    verify = {"phase": "verify", "context_bucket": "1k"}
    waited = value("longleaf_step_seconds_sum", verify)
    assert waited is not None
    assert value("longleaf_timed_verify_seconds_total") == pytest.approx(waited / 2)


def test_plain_steps_are_told_from_drafted_ones(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    bucket = {"context_bucket": "1k"}
    value = bench.registry.get_sample_value
    bench.complete(ask(list(range(100, 120)), max_tokens=4, speculative=False))
    assert value("longleaf_plain_step_seconds_count", bucket) == 3
    assert value("longleaf_timed_context_tokens_total", bucket) == 20 + 21 + 22
    bench.complete(ask(list(range(200, 220)), max_tokens=12))
    drafts = value("longleaf_drafter_span_tokens_count", bucket)
    steps = value("longleaf_commit_len_count", bucket)
    assert drafts is not None
    assert drafts > 0
    assert value("longleaf_plain_step_seconds_count", bucket) == (steps or 0) - drafts


def test_corrupt_accounting_is_fatal(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    bench.add(ask([5, 6, 7], max_tokens=60))
    bench.scheduler.step()
    memory = bench.scheduler.memory
    memory.slots._num_free = 0
    memory.slots._num_cached = memory.slots.capacity
    with pytest.raises(SlotError):
        bench.run()


def test_abandon_tells_everyone(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench(max_running_requests=1)
    requests = [ask([1], max_tokens=50), ask([2])]
    for request in requests:
        bench.add(request)
    bench.scheduler.step()
    bench.scheduler.abandon("the engine is closed")
    for request in requests:
        finish = error(bench.events[request.rid][-1].finish)
        assert (finish.status, finish.message) == (503, "the engine is closed")
    # Nothing is given back: the fixture must not look for it.
    bench.scheduler._waiting.append(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_leaks_nothing(make_bench: MakeBench, ask: Ask, seed: int) -> None:
    """200 submissions and aborts against a small pool: after every step each slot has one owner."""
    rng = np.random.default_rng(seed)
    bench = make_bench(
        SpeculativeOptions(budget=int(rng.integers(1, 24))),
        max_total_tokens=int(rng.integers(160, 400)),
        max_running_requests=4,
        max_queued_requests=6,
        chunked_prefill_size=int(rng.integers(8, 64)),
        decode_headroom=int(rng.integers(0, 32)),
    )
    live: list[GenerationRequest] = []
    for _ in range(200):
        choice = rng.random()
        if choice < 0.35:
            shared = rng.integers(0, 2)
            length = int(rng.integers(1, 120))
            request = ask(
                [*([11, 12, 13] * 20 if shared else []), *rng.integers(100, 140, length)],
                max_tokens=int(rng.integers(1, 60)),
                speculative=bool(rng.integers(0, 2)),
                ignore_eos=bool(rng.integers(0, 2)),
                sampling=SamplingParams(float(rng.choice([0.0, 1.0]))),
                seed=int(rng.integers(0, 9)),
            )
            bench.add(request)
            live.append(request)
        elif choice < 0.5 and live:
            bench.scheduler.cancel(live.pop(int(rng.integers(len(live)))))
        else:
            bench.scheduler.step()
        bench.owners()
    bench.run()
    assert bench.owners()[0] == 0
    assert sum(bench.check_cached_rows(rid) for rid in bench.events) > 0
