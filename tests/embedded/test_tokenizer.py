"""The checkpoint's tokenizer and chat template."""

from pathlib import Path

import pytest

from longleaf.embedded.load import LoadedModels
from longleaf.embedded.tokenizer import TemplateError, Tokenizer

TEXTS = ["Count from 1 to 40.", "naïve café — 漢字 🙂\n\ttab", "", "def f(x):\n    return x"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(loaded: LoadedModels, text: str) -> None:
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_digits_are_single_tokens(loaded: LoadedModels) -> None:
    assert len(loaded.tokenizer.encode("1234567")) == 7


def test_chat_prompt(loaded: LoadedModels) -> None:
    tokenizer = loaded.tokenizer
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}],
        },
    ]
    text = tokenizer.render_chat(messages)
    assert text == ("<|endoftext|><|system|>Be brief.<|end|><|user|>Hi you<|end|><|assistant|>")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[:2] == [0, 4]
    assert ids[-2:] == [5, 3]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "Be brief.Hi you"


def test_a_template_that_refuses(loaded: LoadedModels) -> None:
    template = "{{ raise_exception('no user message') if messages|length < 2 }}"
    tokenizer = Tokenizer(loaded.tokenizer._tokenizer, template, frozenset())
    with pytest.raises(TemplateError, match="no user message"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    without = Tokenizer(loaded.tokenizer._tokenizer, None, frozenset())
    with pytest.raises(TemplateError, match="no chat template"):
        without.render_chat([])


def test_a_template_cannot_reach_out(loaded: LoadedModels) -> None:
    template = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    tokenizer = Tokenizer(loaded.tokenizer._tokenizer, template, frozenset())
    with pytest.raises(TemplateError, match="unsafe"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
