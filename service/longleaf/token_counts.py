"""Numbers of tokens as people write them."""

MOST_TOKENS = 1_000_000
"""No prompt and no answer is longer."""
_ROUND = {"185k": 185_000, "200k": 200_000}
_MOST_DIGITS = 12


def parse_tokens(word: str) -> int | None:
    """512, or 16k (16,384); contexts that are named by round numbers are those: 185k is 185,000,
    200k is 200,000. None for anything else; limits are the caller's.
    """
    text = word.strip().lower()
    digits = text.removesuffix("k")
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS:
        return None
    return _ROUND.get(text, int(digits) * (1024 if text.endswith("k") else 1))
