"""Prompts of an exact length in tokens, of known difficulty, each with a beginning of its own.

A text of each kind is tokenized once; a prompt is cut from it between words, where a byte-level
tokenizer cuts too, so that its tokens can be counted without tokenizing it again. What is missing
to the exact length are digits in a number at the prompt's beginning, never at its end: what the
model goes on from is always plain text.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from longleaf.embedded.tokenizer import Tokenizer
from longleaf.probes.texts import TEXTS
from longleaf_load.lengths import PlanError

KINDS: tuple[str, ...] = tuple(TEXTS)
"""Kinds of text, easiest first."""
_SPARE = 40_000
"""Tokens of a text beyond the longest prompt: prompts begin at different places of them."""
_FEWEST_DIGITS = 8
_MOST_DIGITS = 80
_NUMBER = "[{digits}]\n"
_LINES = 4
"""Of so many seeds in a row, the second one counts in lines."""


class PromptError(PlanError):
    """A prompt of that length cannot be made with this tokenizer."""


@dataclass(frozen=True, slots=True)
class _Corpus:
    """``starts`` and ``ends``: places between words, as (token, character), rising."""

    text: str
    ids: tuple[int, ...]
    starts: tuple[tuple[int, int], ...]
    ends: tuple[tuple[int, int], ...]


class PromptCounter:
    """Counts with one tokenizer (a directory with ``tokenizer.json``)."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = Tokenizer.load(directory)
        except (OSError, ValueError) as error:
            raise PromptError(str(error)) from None
        self.chat_overhead = self._count_chat("x") - self.count("x")
        one, two = ("1" * n for n in (_FEWEST_DIGITS, _FEWEST_DIGITS + 1))
        self._number_base = self.count(_NUMBER.format(digits=one)) - _FEWEST_DIGITS
        if self.count(_NUMBER.format(digits=two)) != self._number_base + _FEWEST_DIGITS + 1:
            raise PromptError("this tokenizer joins digits: exact lengths need single digits")

    @property
    def shortest(self) -> int:
        """Tokens of the shortest chat prompt."""
        return self.chat_overhead + self.shortest_part

    @property
    def shortest_part(self) -> int:
        """Tokens of the shortest text within a chat."""
        return self._number_base + 2 * _FEWEST_DIGITS

    def count(self, text: str) -> int:
        """Tokens of plain text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def count_messages(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Tokens of a chat, with what the template adds."""
        return self.count(self._tokenizer.render_chat(messages))

    def _count_chat(self, text: str) -> int:
        return self.count_messages([{"role": "user", "content": text}])


class PromptSource(PromptCounter):
    """Cuts prompts of up to ``longest`` tokens, of texts that ``seed`` tells."""

    def __init__(self, directory: Path, longest: int, seed: int) -> None:
        super().__init__(directory)
        self.longest = longest
        encoder = HfTokenizer.from_file(str(directory / "tokenizer.json"))
        self._corpora = {kind: _corpus(encoder, kind, longest, seed) for kind in KINDS}

    def text(self, kind: str, length: int, random_: random.Random) -> str:
        """A message whose prompt, alone in a chat, has exactly ``length`` tokens."""
        return self.part(kind, length - self.chat_overhead, random_)

    def part(self, kind: str, length: int, random_: random.Random) -> str:
        """Text of exactly ``length`` tokens, wherever special tokens surround it."""
        corpus = self._corpora[kind]
        words = length - self._number_base - _FEWEST_DIGITS
        if not 1 <= words <= self.longest:
            raise PromptError(f"prompts of {length} tokens are not between 1 and {self.longest}")
        begin, first = corpus.starts[random_.randrange(len(corpus.starts))]
        end, last = corpus.ends[bisect_right(corpus.ends, (begin + words, 1 << 60)) - 1]
        digits = _FEWEST_DIGITS + words - (end - begin)
        if end <= begin or digits > _MOST_DIGITS:
            end, last, digits = begin, first, _FEWEST_DIGITS + words
        number = "".join(random_.choices("123456789", k=digits))
        return _NUMBER.format(digits=number) + corpus.text[first:last]

    def ids(self, kind: str, length: int, random_: random.Random) -> list[int]:
        """A prompt of exactly ``length`` token ids, for completions."""
        corpus = self._corpora[kind]
        begin = random_.randrange(len(corpus.ids) - length + 1)
        own = random_.choices(corpus.ids, k=min(8, length))
        return [*own, *corpus.ids[begin : begin + length - len(own)]]


def _corpus(encoder: HfTokenizer, kind: str, longest: int, seed: int) -> _Corpus:
    wanted = longest + _SPARE
    characters = wanted * 4
    while True:
        text = TEXTS[kind](characters, _LINES * seed + 1)
        encoding = encoder.encode(text, add_special_tokens=False)
        if len(encoding.ids) >= wanted:
            break
        characters = int(characters * 1.1 * wanted / len(encoding.ids))
    places = [
        (token, at)
        for token, (at, _) in enumerate(encoding.offsets[:wanted])
        if at and _between_words(text, at)
    ]
    starts = tuple(place for place in places if place[0] < _SPARE and text[place[1]] != " ")
    ends = tuple(place for place in places if not text[place[1] - 2 : place[1]].isspace())
    return _Corpus(text, tuple(encoding.ids[:wanted]), starts, ends)


def _between_words(text: str, at: int) -> bool:
    """Whether a word begins at ``at``: behind a line's end, or with the one space before it."""
    if text[at] == " ":
        return not text[at - 1].isspace() and text[at + 1 : at + 2].isalnum()
    return text[at - 1] == "\n" and text[at].isalnum()
