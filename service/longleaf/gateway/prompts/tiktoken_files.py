"""Kimi's tokenizer files: ``tiktoken.model``, a byte-pair vocabulary by rank.

The pattern that splits text is not in the file but in the model's own code; this one is that of
the Kimi K2 family (``tokenization_kimi.py``), and so are the lengths at which text is cut first.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
_RESERVED_TOKENS = 256
_CUT_CHARACTERS = 400_000
_CUT_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")


class TiktokenEncoder:
    """Counts with the ``tiktoken`` library."""

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> None:
        import tiktoken  # an optional dependency: longleaf[tiktoken]

        self._encoding = tiktoken.Encoding(
            "longleaf", pat_str=_PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(special)
        )
        self.longest_token_bytes = max(
            max(map(len, ranks)), max((len(token.encode()) for token in special), default=1)
        )

    def count(self, text: str, add_special_tokens: bool) -> int:
        """Tokens of ``text``; these files name no tokens to add around it."""
        return sum(
            len(self._encoding.encode(part, allowed_special="all", disallowed_special=()))
            for piece in _cut(text)
            for part in _cut_runs(piece)
        )


def load_tiktoken(path: Path, config: Mapping[str, Any]) -> TiktokenEncoder:
    """Read the vocabulary at ``path``, special tokens from ``config``; ``ValueError``."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise ValueError(f"{path.name}, line {number}: no token and rank") from None
    if not ranks:
        raise ValueError(f"{path.name} holds no token")
    base = len(ranks)
    special = {f"<|reserved_token_{base + i}|>": base + i for i in range(_RESERVED_TOKENS)}
    named = config.get("added_tokens_decoder")
    if isinstance(named, dict):
        for token_id, token in named.items():
            special.pop(f"<|reserved_token_{token_id}|>", None)
            special[str(token["content"])] = int(token_id)
    return TiktokenEncoder(ranks, special)


def _cut(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CUT_CHARACTERS):
        yield text[start : start + _CUT_CHARACTERS]


def _cut_runs(text: str) -> Iterator[str]:
    """Cut where a run of blanks, or of none, gets longer than the library can take."""
    start = 0
    for run in _RUNS.finditer(text):
        length = run.end() - run.start()
        if length > _CUT_RUN:
            for cut in range(run.start() + _CUT_RUN, run.end(), _CUT_RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]
