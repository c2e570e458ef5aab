import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from longleaf_load.arrivals import arrivals
from longleaf_load.lengths import PlanError
from longleaf_load.plan import Plan, parse_plan
from longleaf_load.prompts import KINDS, PromptCounter, PromptError, PromptSource
from longleaf_load.sessions import Sessions, Turn, check_lengths

TOKENIZER = DEFAULT_MODELS / "tiny-target"


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return PromptSource(TOKENIZER, 20_000, seed=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_exactly_the_length(
    kind: str, source: PromptSource, tokenizer: Tokenizer
) -> None:
    random_ = random.Random(kind)
    lengths = [
        source.shortest,
        200,
        1_000,
        20_000,
        *(random_.randint(25, 3_000) for _ in range(60)),
    ]
    heads = set()
    for length in lengths:
        text = source.text(kind, length, random_)
        chat = tokenizer.render_chat([{"role": "user", "content": text}])
        assert len(tokenizer.encode(chat, add_special_tokens=False)) == length
        heads.add(text[:9])
    assert len(heads) == len(lengths), "each prompt begins in its own way"


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_text_and_not_padding(kind: str, source: PromptSource) -> None:
    text = source.text(kind, 2_000, random.Random(5))
    number, body = text.split("\n", 1)
    assert len(number) < 90
    assert {"predictable": "\n", "code": "def ", "prose": " the "}[kind] in body
    assert (sum(character.isdigit() for character in body) > len(body) / 2) is (
        kind == "predictable"
    )


def test_prompts_of_ids_have_the_length(source: PromptSource) -> None:
    one, two = (source.ids("code", 500, random.Random(seed)) for seed in (1, 2))
    assert len(one) == len(two) == 500
    assert one[:8] != two[:8]


def test_a_length_that_cannot_be_is_said(source: PromptSource) -> None:
    with pytest.raises(PromptError, match="not between 1 and 20000"):
        source.text("code", 50_000, random.Random(1))


def a_plan(**values: Any) -> Plan:
    given = {
        "phase": [{"seconds": 100, "rate": 1.0}],
        "prompts": {"length": "uniform 100 400", "longest": 20_000},
    }
    return parse_plan({**given, **values}, Path())


def sessions(source: PromptSource, **values: Any) -> Sessions:
    return Sessions(a_plan(**values), source, "tiny")


def test_sessions_repeat_by_seed_and_number(source: PromptSource) -> None:
    one, two = sessions(source), sessions(source)
    first = [one.turns(arrival).next() for arrival in one.arrivals()]
    backwards = [two.turns(arrival).next() for arrival in reversed(list(two.arrivals()))]
    assert first == backwards[::-1]
    other = sessions(source, seed=2)
    assert first != [other.turns(arrival).next() for arrival in other.arrivals()]


def test_turns_carry_the_conversation(source: PromptSource) -> None:
    made = sessions(source, turns={"count": 3})
    talk = made.turns(next(iter(made.arrivals())))
    first = talk.next()
    assert first is not None
    second = talk.next("First answer.")
    assert second is not None
    roles = [message["role"] for message in second.body["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert second.body["messages"][:1] == first.body["messages"]
    assert second.prompt_tokens == source.count_messages(second.body["messages"])
    assert talk.next("Second.") is not None
    assert talk.next("Third.") is None


def test_documents_are_asked_about_again(source: PromptSource) -> None:
    made = sessions(source, documents={"count": 3, "length": "2k", "share": 0.5})
    turns = [made.turns(arrival).next() for arrival in made.arrivals()]
    about = [turn for turn in turns if turn is not None and turn.document is not None]
    assert 0.3 * len(turns) < len(about) < 0.7 * len(turns)
    texts = {turn.body["messages"][0]["content"] for turn in about}
    assert len(texts) == len({turn.document for turn in about}) == 3
    questions = {turn.body["messages"][1]["content"] for turn in about}
    assert len(questions) == len(about)
    for turn in about:
        assert turn.prompt_tokens == source.count_messages(turn.body["messages"])
        assert turn.prompt_tokens > 2048


def test_some_clients_leave(source: PromptSource) -> None:
    phase = [{"seconds": 100, "rate": 10.0}]
    made = sessions(source, phase=phase, cancel={"share": 0.4, "seconds": 5})
    turns = [made.turns(arrival).next() for arrival in made.arrivals()]
    gone = [turn for turn in turns if turn is not None and turn.leave_after is not None]
    assert len(gone) / len(turns) == pytest.approx(0.4, abs=0.05)
    waits = [turn.leave_seconds for turn in gone if turn.leave_seconds is not None]
    assert len(waits) / len(gone) == pytest.approx(0.5, abs=0.1)
    assert statistics.fmean(waits) == pytest.approx(5, rel=0.2)
    assert all(turn.leave_after == 1 for turn in gone if turn.leave_seconds is not None)
    after = {turn.leave_after for turn in gone if turn.leave_seconds is None}
    assert after == set(range(2, 21))
    assert all(
        turn.leave_seconds is None
        for turn in turns
        if turn is not None and turn.leave_after is None
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": {"length": 5}}, "prompts.length: 5 tokens are less than the shortest prompt"),
        ({"prompts": {"length": "uniform 9 1k"}}, "prompts.length: 9 tokens are less"),
        (
            {"prompts": {"length": [{"share": 1, "length": "1k"}, {"share": 1, "length": 7}]}},
            "prompts.length: 7 tokens are less",
        ),
        ({"prompts": {"length": 8, "longest": 8}}, "prompts.longest: 8 tokens are less"),
        ({"documents": {"share": 0.1, "length": 5}}, "documents.length: 5 tokens are less"),
        (
            {"documents": {"share": 0.1, "length": 20_000}},
            "documents.length: 20000 tokens and a question are more than prompts.longest, 20000",
        ),
    ],
)
def test_lengths_that_the_tokenizer_cannot_make_are_named(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_lengths(a_plan(**values), PromptCounter(TOKENIZER))


def test_the_shortest_and_the_longest_are_made(source: PromptSource) -> None:
    check_lengths(plan := a_plan(prompts={"length": source.shortest}), source)
    first = Sessions(plan, source, "tiny").turns(next(iter(arrivals(plan.phases, 1)))).next()
    assert first is not None
    assert first.prompt_tokens == source.count_messages(first.body["messages"]) == source.shortest
    with pytest.raises(PlanError) as told:
        check_lengths(a_plan(documents={"share": 1, "length": 20_000}), source)
    most = int(str(told.value).split()[-1])
    long = a_plan(documents={"share": 1, "length": most, "count": 1})
    check_lengths(long, source)
    made = Sessions(long, source, "tiny")
    longest = 0
    for arrival in made.arrivals():
        turn = made.turns(arrival).next()
        assert turn is not None
        longest = max(longest, source.count_messages(turn.body["messages"]))
    assert 20_000 - 10 < longest <= 20_000


def test_completions_may_be_shorter_than_any_chat(source: PromptSource) -> None:
    plan = a_plan(prompts={"length": 1, "longest": 20_000}, api="completions")
    check_lengths(plan, source)
    made = Sessions(plan, source, "tiny")
    turn = made.turns(next(iter(made.arrivals()))).next()
    assert turn is not None
    assert len(turn.body["prompt"]) == turn.prompt_tokens == 1


def test_a_trace_says_what_is_asked(source: PromptSource, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "prompt_tokens": 300, "max_tokens": 20, "text": "code"},
        {"timestamp": 4000, "prompt_tokens": 900, "max_tokens": 30, "text": "prose"},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = Sessions(parse_plan({"trace": "t.jsonl"}, tmp_path), source, "tiny")
    coming = list(made.arrivals())
    assert [arrival.at for arrival in coming] == [0.0, 4.0]
    turns = [made.turns(arrival).next() for arrival in coming]
    asked = [(one.prompt_tokens, one.max_tokens, one.text) for one in turns if one is not None]
    assert asked == [(300, 20, "code"), (900, 30, "prose")]


def trace_of(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "t.jsonl")


def test_phases_rule_whatever_their_name_and_their_trace(
    source: PromptSource, tmp_path: Path
) -> None:
    times = [{"timestamp": at, "prompt_tokens": 300} for at in (0, 1000, 2000)]
    phase = {"name": "trace", "seconds": 100, "rate": 2.0}
    later = {"name": "later", "seconds": 100, "rate": 1.0}
    made = sessions(source, phase=[phase, later], trace=trace_of(tmp_path, *times))
    coming = list(made.arrivals())
    assert [one.phase for one in coming].count(0) == pytest.approx(200, rel=0.2)
    assert [one.phase for one in coming].count(1) == pytest.approx(100, rel=0.3)


def test_lines_of_a_trace_that_cannot_be_are_named(source: PromptSource, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {"prompt_tokens": 300}, {"prompt_tokens": 1})
    message = r"t.jsonl:2: prompt_tokens: 1 are less than the shortest prompt .* tokenizer, \d+$"
    with pytest.raises(PlanError, match=message):
        check_lengths(a_plan(trace=trace), source)
    check_lengths(a_plan(trace=trace, api="completions"), source)


def first_turns(made: Sessions) -> list[Turn]:
    turns = [made.turns(arrival).next() for arrival in made.arrivals()]
    return [turn for turn in turns if turn is not None]


def test_what_is_asked_is_what_was_drawn(source: PromptSource) -> None:
    turns = first_turns(sessions(source, answers={"max_tokens": "uniform 16 400"}))
    assert len({turn.max_tokens for turn in turns}) > 20
    for turn in turns:
        body = turn.body
        assert (body["max_tokens"], body["metadata"]) == (turn.max_tokens, {"text": turn.text})
        assert 16 <= turn.max_tokens <= 400
        assert (body["ignore_eos"], body["stream"], body["temperature"]) == (True, True, 0)
        assert body["stream_options"] == {"include_usage": True}


def test_texts_and_documents_have_their_shares(source: PromptSource) -> None:
    prompts = {"length": 100, "longest": 20_000, "texts": {"prose": 9, "code": 1}}
    phase = [{"seconds": 100, "rate": 6.0}]
    turns = first_turns(sessions(source, phase=phase, prompts=prompts))
    prose = sum(turn.text == "prose" for turn in turns)
    assert {turn.text for turn in turns} == {"prose", "code"}
    assert prose / len(turns) == pytest.approx(0.9, abs=0.05)
    documents = {"count": 3, "length": 200, "share": 1.0}
    asked = [
        one.document for one in first_turns(sessions(source, phase=phase, documents=documents))
    ]
    for number, part in enumerate((6 / 11, 3 / 11, 2 / 11)):  # Zipf
        assert asked.count(number) / len(asked) == pytest.approx(part, abs=0.07)


def test_even_lengths_look_like_many(source: PromptSource) -> None:
    length = [{"share": 0.7, "length": 100}, {"share": 0.3, "length": 200}]
    prompts = {"length": length, "longest": 20_000, "even": True}
    long = [turn.prompt_tokens == 200 for turn in first_turns(sessions(source, prompts=prompts))]
    for begin in (0, 20, 40):  # any forty in a row
        assert abs(sum(long[begin : begin + 40]) - 12) <= 1


def test_a_conversation_ends_where_its_prompt_would_be_too_long(source: PromptSource) -> None:
    prompts = {"length": 400, "longest": 600}
    made = sessions(source, turns={"count": 9}, prompts=prompts)
    talk = made.turns(next(iter(made.arrivals())))
    assert talk.next() is not None
    assert talk.next("Short.") is not None
    assert talk.next("A word. " * 200) is None
