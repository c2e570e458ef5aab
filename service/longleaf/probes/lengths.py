"""Context lengths as people write them: 1k is 1,024 tokens, 200k is 200,000."""

import click

_NAMED = {"200k": 200_000, "185k": 185_000}
_MOST = 1 << 24
_USUAL = (1 << 10, 16 << 10, 64 << 10)

CONTEXTS_HELP = "Prompt tokens.  [default: 1k,16k,64k, as far as the server takes them]"


class Contexts(click.ParamType[tuple[int, ...]]):
    """Lengths with commas between: ``512,1k,16k``; ascending afterwards."""

    name = "contexts"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse; a wrong part is named."""
        if isinstance(value, tuple):
            return value
        lengths = []
        for part in str(value).split(","):
            text = part.strip().lower()
            number = text.removesuffix("k")
            if not (number.isascii() and number.isdecimal() and len(number) < 10):
                self.fail(f"{part.strip()[:20]!r} is no length such as 512 or 16k", param, ctx)
            length = _NAMED.get(text, int(number) * (1024 if text.endswith("k") else 1))
            if not 0 < length <= _MOST:
                self.fail(f"{part.strip()} is not from 1 to {label(_MOST)} tokens", param, ctx)
            lengths.append(length)
        return tuple(sorted(set(lengths)))


def usual(room: int | None) -> tuple[int, ...]:
    """1k, 16k and 64k; where a prompt of so many tokens has no ``room``, the longest power of two
    that has, with a quarter to spare, ends the row.
    """
    if room is None or room >= _USUAL[-1]:
        return _USUAL
    longest = 1 << max(0, (3 * room // 4).bit_length() - 1)
    return (*(length for length in _USUAL if length < longest), longest)


def label(tokens: int) -> str:
    """``16k`` for 16,384."""
    for name, length in _NAMED.items():
        if tokens == length:
            return name
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
