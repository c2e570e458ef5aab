"""Prompts of an exact length in tokens, of known difficulty: predictable text, code, prose."""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longleaf.embedded.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "commit_prompts.json.xz"
_COUNTING = ("{i}, ", "{i}\n", "line {i}\n", "item {i}: ")


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens``: int64 [length]; ``name`` says what text it is cut from."""

    name: str
    tokens: NDArray[np.int64]


class PromptSource:
    """Cuts prompts from held-out texts (see data/README.md) with the served tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._data: dict[str, Any] = json.loads(lzma.decompress(DATA.read_bytes()))

    def predictable(self, length: int, each: int) -> list[Prompt]:
        """``each`` prompts of repeated sentences, of counting and of boilerplate."""
        prompts = []
        for n in range(each):
            sentence = " " + self._data["sentences"][n]
            prompts.append(self._grown(f"sentence {n}", sentence, length, n))
            counting = _COUNTING[n % len(_COUNTING)]
            prompts.append(self._grown(f"counting {counting!r}", counting, length, n))
            item = self._data["boilerplate"][n % len(self._data["boilerplate"])]
            prompts.append(self._grown(f"boilerplate {item['name']}", item["template"], length, n))
        return prompts

    def cut(self, kind: str, length: int, each: int) -> list[Prompt]:
        """``each`` windows of every source of ``kind`` ("prose" or "code"), spread over its text.

        Sources shorter than ``length`` tokens are left out.
        """
        prompts = []
        for item in self._data[kind]:
            tokens = self._encode(item["text"])
            if len(tokens) < length:
                continue
            ends = np.linspace(length, len(tokens), each + 1)[1:].astype(int)
            prompts += [Prompt(f"{item['source']} @{n}", tokens[n - length : n]) for n in ends]
        return prompts

    def _grown(self, name: str, template: str, length: int, n: int) -> Prompt:
        """``length`` tokens of the template filled with 1, 2, 3, …, each ``n`` from another start.

        The cut falls inside a period, at a place that depends on ``n``.
        """
        pieces: list[str] = []
        count = max(64, length // 2)
        while True:
            start = 1 + 13 * n + len(pieces)
            pieces += [template.format(i=i, j=10 * i) for i in range(start, start + count)]
            tokens = self._encode("".join(pieces))
            if len(tokens) >= length + 5 * n:
                return Prompt(name, tokens[5 * n : 5 * n + length])

    def _encode(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self._tokenizer.encode(text), dtype=np.int64)
