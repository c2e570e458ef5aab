"""The checkpoint's tokenizer: text to ids, ids to bytes, and the chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HfTokenizer

from longleaf.embedded.fields import ConfigError, read_object


class TemplateError(ValueError):
    """The chat template refused the messages."""


class Tokenizer:
    """A byte-level BPE tokenizer and its chat template, as a checkpoint directory holds them."""

    def __init__(
        self, tokenizer: HfTokenizer, chat_template: str | None, special: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = _compile(chat_template) if chat_template is not None else None
        self.special_ids = special
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes = _bytes_by_id(tokenizer, self.vocab_size)
        self.longest_token_bytes: int = max(map(len, self._bytes))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and ``tokenizer_config.json`` from ``directory``.

        ``ConfigError`` and ``FileNotFoundError`` name the file.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        try:
            tokenizer: HfTokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path}: {error}") from None
        config_path = directory / "tokenizer_config.json"
        config = read_object(config_path) if config_path.is_file() else {}
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        try:
            return cls(tokenizer, config.get("chat_template"), special)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{config_path}: chat_template: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written in it become their ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that form no UTF-8 come out as U+FFFD."""
        shown = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self._bytes[i] for i in shown).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for."""
        return self._bytes[token_id]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt that the chat template makes of ``messages``, ready for the answer.

        The template writes every special token itself: encode it without adding any.
        ``extra`` are further variables of the template. ``TemplateError`` when the checkpoint has
        no template or the template raises.
        """
        if self._template is None:
            raise TemplateError("the model has no chat template: use /v1/completions")
        variables = {"add_generation_prompt": True, **(extra or {}), "messages": messages}
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _bytes_by_id(tokenizer: HfTokenizer, size: int) -> list[bytes]:
    byte_of = _byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    table: list[bytes] = []
    for token_id in range(size):
        piece = tokenizer.id_to_token(token_id)
        if piece is None:
            table.append(b"")
        elif token_id in added:
            table.append(piece.encode())
        elif all(char in byte_of for char in piece):
            table.append(bytes(byte_of[char] for char in piece))
        else:
            raise ValueError(f"token {token_id} ({piece!r}) is no byte-level BPE token")
    return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: the inverse of that mapping."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    moved = {chr(256 + index): byte for index, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in printable} | moved
