"""Text leaves in whole characters, and stops are found wherever the token borders are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from longleaf.embedded.text import TextAssembler
from longleaf.embedded.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """Every byte a token: the hardest borders there are."""
    vocabulary = {char: index for index, char in enumerate(ALPHABET)}
    hf = HfTokenizer(models.BPE(vocabulary, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(hf, None, frozenset({len(ALPHABET)}))


TEXT = st.text(alphabet="ab🙂é漢 \n", max_size=30)


@given(text=TEXT, stop=st.lists(st.text(alphabet="ab🙂é", min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(
    byte_tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    assembler = TextAssembler(byte_tokenizer, stop)
    pieces: list[str] = []
    matched = None
    for token in byte_tokenizer.encode(text):
        matched = assembler.push(token)
        pieces.append(assembler.take())
        if matched is not None:
            break
    pieces.append(assembler.close())
    ends = [text.index(s) + len(s) for s in stop if s in text]
    if not ends:
        assert matched is None
        assert "".join(pieces) == text
        return
    assert matched in stop
    # The stop that is complete first ends the answer; of several, the one that begins first.
    begun = min(text.index(s) for s in stop if s in text and text.index(s) + len(s) == min(ends))
    assert "".join(pieces) == text[:begun]
    assert "\ufffd" not in "".join(pieces)


def test_no_piece_ends_inside_a_character(byte_tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(byte_tokenizer)
    taken = []
    for token in byte_tokenizer.encode("a🙂b"):
        assembler.push(token)
        taken.append(assembler.take())
    assert taken == ["a", "", "", "", "🙂", "b"]


def test_an_unfinished_character_is_shown_only_at_the_end(byte_tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(byte_tokenizer)
    for token in byte_tokenizer.encode("x🙂")[:3]:
        assembler.push(token)
    assert assembler.take() == "x"
    assert assembler.close() == "\ufffd"


def test_what_may_become_a_stop_is_held_back(byte_tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(byte_tokenizer, ["END."])
    taken = []
    for token in byte_tokenizer.encode("xENEND!"):
        assert assembler.push(token) is None
        taken.append(assembler.take())
    assert taken == ["x", "", "", "EN", "", "", "END!"]


def test_stop_can_be_kept(byte_tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(byte_tokenizer, ["b"], keep_stop=True)
    matched = [assembler.push(token) for token in byte_tokenizer.encode("ab")]
    assert matched == [None, "b"]
    assert assembler.take() + assembler.close() == "ab"


def test_special_tokens_are_shown_on_request(byte_tokenizer: Tokenizer) -> None:
    end = len(ALPHABET)
    for skip, shown in ((True, "a"), (False, "a<|end|>")):
        assembler = TextAssembler(byte_tokenizer, skip_special_tokens=skip)
        for token in (*byte_tokenizer.encode("a"), end):
            assembler.push(token)
        assert assembler.take() == shown
        assert byte_tokenizer.decode([*byte_tokenizer.encode("a"), end], skip) == shown
