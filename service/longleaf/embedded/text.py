"""Text of a growing answer: whole characters only, and nothing that may turn out to be a stop
string.
"""

import codecs
from collections.abc import Sequence

from longleaf.embedded.tokenizer import Tokenizer


class TextAssembler:
    """Turns an answer's tokens into text that is safe to send.

    A character is held back until its last byte is there; text that could be the beginning of a
    stop string is held back until the next tokens settle it. Stop strings are found across token
    borders.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special_tokens
        self._keep_stop = keep_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def push(self, token: int) -> str | None:
        """Add one token; returns the stop string that it completes, if any. Nothing may be pushed
        after that.
        """
        if self._skip_special and token in self._tokenizer.special_ids:
            return None
        self._pending += self._decoder.decode(self._tokenizer.token_bytes(token))
        found = [(at, stop) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._pending = self._pending[: at + len(stop) if self._keep_stop else at]
        self._decoder.reset()
        self._stop = ()
        return stop

    def take(self) -> str:
        """Text that no later token can change, and that was not taken before."""
        held = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        ready = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(ready) :]
        return ready

    def close(self) -> str:
        """What is left when the answer ends; an unfinished character comes out as U+FFFD."""
        rest = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
