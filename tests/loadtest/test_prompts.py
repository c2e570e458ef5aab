import json
import random
from pathlib import Path
from typing import Any

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from longleaf_load.plan import parse_plan
from longleaf_load.prompts import KINDS, PromptError, PromptSource
from longleaf_load.sessions import Sessions

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


def sessions(source: PromptSource, **values: Any) -> Sessions:
    plan = parse_plan(
        {
            "phase": [{"seconds": 100, "rate": 1.0}],
            "prompts": {"length": "uniform 100 400", "longest": 20_000},
            **values,
        },
        Path(),
    )
    return Sessions(plan, source, "tiny")


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
    made = sessions(source, cancel={"share": 0.4})
    leave = [made.turns(arrival).next() for arrival in made.arrivals()]
    after = [turn.leave_after for turn in leave if turn is not None]
    gone = [count for count in after if count is not None]
    assert 0.2 * len(after) < len(gone) < 0.6 * len(after)
    assert 0 in gone
    assert max(gone) > 1


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
