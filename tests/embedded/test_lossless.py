"""Speculation, batching, caching and chunking change how fast an answer comes, never which one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from longleaf.ddtree import SamplingParams, draw, target_distribution
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import SpeculativeOptions
from longleaf.embedded.request import GenerationRequest
from longleaf.embedded.sampling import position_uniforms
from longleaf.embedded.target import Segment

from .conftest import Bench, MakeBench

Ask = Callable[..., GenerationRequest]

PROMPTS = (
    "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "def add(left, right):\n    return left +",
    "It was late in the year, and the road to the coast lay empty under",
    "{",
)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, min_p=0.01)
SHAPES = (
    SpeculativeOptions(),
    SpeculativeOptions(budget=7, topk=1),
    SpeculativeOptions(budget=40, topk=6, seed_chain=False),
    SpeculativeOptions(budget=5, block=4),
)


def answers(bench: Bench, *requests: GenerationRequest) -> list[tuple[int, ...]]:
    return [event.tokens for event in bench.complete(*requests)]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SAMPLED], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=["tree", "chain", "wide", "short"])
def test_speculation_changes_no_token(
    make_bench: MakeBench, ask: Ask, shape: SpeculativeOptions, sampling: SamplingParams
) -> None:
    bench = make_bench(shape)
    for seed, prompt in enumerate(PROMPTS if shape == SpeculativeOptions() else PROMPTS[:2]):
        fields = {"sampling": sampling, "seed": seed, "max_tokens": 40}
        plain, drafted = (
            ask(prompt, speculative=speculative, **fields) for speculative in (False, True)
        )
        assert answers(bench, plain) == answers(bench, drafted)
        assert len(bench.answer(plain.rid).tokens) == 40


@pytest.mark.parametrize("speculative", [False, True])
def test_a_seeded_answer_is_drawn_by_its_positions(
    make_bench: MakeBench, ask: Ask, speculative: bool
) -> None:
    """The token at a position is the target's distribution there, drawn with its uniform."""
    bench = make_bench()
    hot = SamplingParams(temperature=2.5, top_p=0.98, top_k=500)
    request = ask(PROMPTS[0], sampling=hot, seed=3, max_tokens=12, speculative=speculative)
    (tokens,) = answers(bench, request)
    target = bench.models.target
    text = np.array([*request.prompt, *tokens])
    rows = np.arange(len(text))
    pool = KvPool(target.config, None, len(text))
    logits = target.logits(target.forward([Segment(text, rows, rows, rows[:0])], pool).hidden)
    for position in range(len(request.prompt), len(text)):
        probs = target_distribution(logits[position - 1], hot)
        uniform = position_uniforms(request.seed, position, 1)[0]
        assert draw(probs, float(uniform)) == text[position]


def test_an_engine_without_drafter_agrees(
    make_bench: MakeBench, ask: Ask, plain: SpeculativeOptions
) -> None:
    def drop(models: LoadedModels) -> LoadedModels:
        return replace(models, models=replace(models.models, drafter=None))

    with_drafter, without = make_bench(), make_bench(plain, edit=drop)
    for prompt in PROMPTS:
        request = ask(prompt, rid="same")
        with_drafter.events.clear()
        without.events.clear()
        assert answers(with_drafter, request) == answers(without, request)


def test_a_mixed_batch_equals_each_alone(make_bench: MakeBench, ask: Ask) -> None:
    requests = [
        ask(
            prompt,
            seed=seed,
            max_tokens=20 + 7 * seed,
            sampling=SAMPLED if seed % 2 else SamplingParams(temperature=0.0),
            speculative=seed != 2,
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    together = answers(make_bench(), *requests)
    alone = [answers(make_bench(), request)[0] for request in requests]
    assert together == alone


def test_a_cached_prefix_skips_prefill_and_changes_nothing(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    document = PROMPTS[1]
    first, second = ask(document + "One"), ask(document + "Two")
    same = zip(first.prompt, second.prompt, strict=False)
    shared = next(i for i, (left, right) in enumerate(same) if left != right)
    answers(bench, first)
    before = bench.scheduler.snapshot().total_prefill_uncached_tokens
    assert before == len(first.prompt)
    cached = answers(bench, second)
    computed = bench.scheduler.snapshot().total_prefill_uncached_tokens - before
    assert computed == len(second.prompt) - shared
    assert bench.answer(second.rid).usage.cached_tokens == shared
    total = len(first.prompt) + len(second.prompt)
    assert bench.scheduler.snapshot().cache_hit_rate == shared / total
    assert cached == answers(make_bench(), ask(document + "Two"))
    # The draft K/V came from the cache as well: the tree is accepted as without it.
    fresh_stats = make_bench().complete(ask(document + "Two"))[0].usage.spec
    assert bench.answer(second.rid).usage.spec.histogram == fresh_stats.histogram


def test_the_whole_conversation_is_reused(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    first = ask(PROMPTS[0], max_tokens=30)
    (answer,) = answers(bench, first)
    turn = [*first.prompt.tolist(), *answer, *first.prompt.tolist()]
    second = ask(turn)
    follow_up = answers(bench, second)
    # All of the first turn but its last token, whose row was never computed.
    assert bench.answer(second.rid).usage.cached_tokens == len(first.prompt) + len(answer) - 1
    assert follow_up == answers(make_bench(), ask(turn))


def test_repeating_a_prompt_computes_one_token(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    once, again = ask(PROMPTS[1]), ask(PROMPTS[1])
    assert answers(bench, once) == answers(bench, again)
    assert bench.answer(again.rid).usage.cached_tokens == len(again.prompt) - 1


def test_salts_and_unspeculated_requests_keep_their_prefixes_apart(
    make_bench: MakeBench, ask: Ask
) -> None:
    bench = make_bench()
    variants: list[dict[str, object]] = [{}, {"cache_salt": "x"}, {"speculative": False}]
    for fields in variants:
        request = ask(PROMPTS[1], **fields)
        answers(bench, request)
        assert bench.answer(request.rid).usage.cached_tokens == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_size_changes_no_token(make_bench: MakeBench, ask: Ask, chunk: int) -> None:
    prompt = PROMPTS[1][: 300 if chunk == 1 else None]
    whole = answers(make_bench(), ask(prompt))
    assert answers(make_bench(chunked_prefill_size=chunk), ask(prompt)) == whole


def test_retraction_changes_no_token(make_bench: MakeBench, ask: Ask) -> None:
    """Four answers of 200 tokens do not fit 512 slots: some are put back and computed again."""
    requests = [
        ask(
            prompt, seed=seed, max_tokens=200, sampling=SAMPLED if seed % 2 else SamplingParams(0.0)
        )
        for seed, prompt in enumerate(("a b c", "1 2 3", "x = 1\n", "Dear Sir"))
    ]
    tight = make_bench(max_total_tokens=512, decode_headroom=0)
    retracted = 0
    for request in requests:
        tight.add(request)
    while not tight.scheduler.idle:
        tight.scheduler.step()
        retracted = max(retracted, tight.scheduler.snapshot().num_retracted_reqs)
        tight.owners()
    assert retracted > 0
    roomy = make_bench(max_total_tokens=2048)
    assert [tight.answer(r.rid).tokens for r in requests] == answers(roomy, *requests)
    for request in requests:
        tight_text, roomy_text = tight.answer(request.rid).text, roomy.answer(request.rid).text
        assert tight_text == roomy_text


def test_seeds_matter(make_bench: MakeBench, ask: Ask) -> None:
    hot = SamplingParams(temperature=3.0)
    requests = [ask("a", sampling=hot, seed=seed) for seed in (1, 2, 1)]
    one, two, same = answers(make_bench(), *requests)
    assert one == same
    assert one != two


def test_logprobs_do_not_depend_on_speculation(make_bench: MakeBench, ask: Ask) -> None:
    bench = make_bench()
    plain, drafted = (
        bench.complete(ask(PROMPTS[0], logprobs=3, speculative=speculative))[0]
        for speculative in (False, True)
    )
    assert len(plain.logprobs) == len(drafted.logprobs) == 32
    for left, right, token in zip(plain.logprobs, drafted.logprobs, plain.tokens, strict=True):
        assert left.token == right.token == token == left.top[0][0]
        np.testing.assert_allclose(left.logprob, right.logprob, atol=1e-4)
        assert left.logprob == left.top[0][1] <= 0.0
