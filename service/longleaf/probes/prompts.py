"""Prompts of a text, as long as asked by the server's own count."""

import aiohttp

from longleaf.probes.client import ProbeError, Server, complete
from longleaf.probes.texts import TEXTS

_CALIBRATION = 16_000
"""Characters, at most, of the beginning of a text by which its length in tokens is estimated."""
_WIDEST = 64
"""Characters a token, at most: beyond, the server does not count what it got."""


async def prompt_of(
    http: aiohttp.ClientSession, server: Server, text: str, context: int, seed: int
) -> str:
    """A prompt of about ``context`` tokens; ``ProbeError`` if the server refuses its beginning."""
    build = TEXTS[text]
    begin = build(min(context, _CALIBRATION), seed)  # a token is a character or more
    counted = (await complete(http, server, begin, max_tokens=1)).prompt_tokens
    if len(begin) > _WIDEST * counted:
        raise ProbeError(f"the server counts {counted} tokens in {len(begin)} characters")
    return build(round(context * len(begin) / counted), seed)
