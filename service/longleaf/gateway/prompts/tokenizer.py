"""A model's tokenizer, from its files: how many tokens a prompt has."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as HfTokenizer

from longleaf.gateway.prompts.chat_template import ChatTemplate, TemplateError
from longleaf.gateway.prompts.tiktoken_files import load_tiktoken


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; the message names the file."""


class Encoder(Protocol):
    """Text to a number of tokens."""

    longest_token_bytes: int
    """A text of n bytes has at least n / this many tokens."""

    def count(self, text: str, add_special_tokens: bool) -> int:
        """Tokens of ``text``; special tokens written in it count as one."""
        ...


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of the longest prompt and of all together; usually there is one."""

    longest: int
    total: int
    at_least: bool = False
    """Not counted: so many at least, which is too many."""


class Tokenizer:
    """Counts chats and plain prompts."""

    def __init__(self, encoder: Encoder, template: ChatTemplate | None) -> None:
        self._encoder = encoder
        self._template = template

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` (or ``tiktoken.model``), ``tokenizer_config.json`` and
        ``chat_template.jinja``. ``TokenizerError`` for what is missing or wrong.
        """
        config = _read_config(directory / "tokenizer_config.json")
        try:
            encoder = _load_encoder(directory, config)
            source = _template_source(directory, config)
            template = None if source is None else ChatTemplate(source, _special_tokens(config))
        except TokenizerError:
            raise
        except Exception as error:  # the tokenizer libraries raise nothing narrower
            raise TokenizerError(f"{directory}: {error}") from error
        return cls(encoder, template)

    def count_chat(self, messages: Any, extra: Mapping[str, Any], most: int | None) -> Count:
        """Tokens of a chat's prompt; ``TemplateError`` where the template refuses it.

        A text that must have more than ``most`` tokens by its size is not counted.
        """
        if self._template is None:
            raise TemplateError("the model has no chat template")
        return self._count(self._template.render(messages, extra), False, most)

    def count_prompts(self, prompts: list[str], most: int | None) -> Count:
        """Tokens of the prompts of a completion."""
        counts = [self._count(prompt, True, most) for prompt in prompts]
        longest = max(counts, key=lambda count: count.longest)
        return Count(longest.longest, sum(count.longest for count in counts), longest.at_least)

    def _count(self, text: str, add_special_tokens: bool, most: int | None) -> Count:
        size = len(text.encode("utf-8", errors="replace"))
        fewest = -(-size // self._encoder.longest_token_bytes)
        if most is not None and fewest > most:
            return Count(fewest, fewest, at_least=True)
        tokens = self._encoder.count(text, add_special_tokens)
        return Count(tokens, tokens)


class _HfEncoder:
    def __init__(self, path: Path) -> None:
        self._tokenizer: HfTokenizer = HfTokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Byte-level vocabularies write each byte as one character; others are longer in UTF-8.
        self.longest_token_bytes = max(len(token.encode()) for token in vocabulary)

    def count(self, text: str, add_special_tokens: bool) -> int:
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return len(encoded[0])


def _load_encoder(directory: Path, config: Mapping[str, Any]) -> Encoder:
    if (directory / "tokenizer.json").is_file():
        return _HfEncoder(directory / "tokenizer.json")
    if (directory / "tiktoken.model").is_file():
        return load_tiktoken(directory / "tiktoken.model", config)
    raise TokenizerError(f"no tokenizer.json or tiktoken.model in {directory}")


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path}: must be a JSON object")
    return config


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found
