"""Context lengths as people write them: 1k is 1,024 tokens, 200k is 200,000."""

import click

_NAMED = {"200k": 200_000, "185k": 185_000}


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
            if not number.isdecimal() or int(number) == 0:
                self.fail(f"{part.strip()!r} is no length such as 512 or 16k", param, ctx)
            lengths.append(_NAMED.get(text, int(number) * (1024 if text.endswith("k") else 1)))
        return tuple(sorted(set(lengths)))


def label(tokens: int) -> str:
    """``16k`` for 16,384."""
    for name, length in _NAMED.items():
        if tokens == length:
            return name
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
