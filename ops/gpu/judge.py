"""What is wrong with a server's greedy answers: the one judgement of good and planted servers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ops.gpu.client import Generation

GAP = 0.25
"""Most that the two best log-probabilities may differ where answers part, in nats.

Logits are bf16 and lie between 16 and 32 where a token is likely: one unit in the last place is
0.125, and two kernels that sum in different orders may each be off by one.
"""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer first leaves the reference.

    gap: how far the reference puts the answer's token under its own there, in nats; infinite
    where it is not among the tokens that the reference reports.
    """

    prompt: int
    position: int
    gap: float


def partings(answers: Sequence[Generation], references: Sequence[Generation]) -> list[Parting]:
    """First differences, one for each answer that differs; references hold top_logprobs >= 2."""
    found = []
    for index, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        pairs = enumerate(zip(answer.tokens, reference.tokens, strict=False))
        position = next((at for at, (a, b) in pairs if a != b), None)
        if position is None:
            if len(answer.tokens) != len(reference.tokens):
                found.append(Parting(index, len(answer.tokens), math.inf))
            continue
        # Of tokens that tie, the reference may report either first.
        known = {token: value for value, token in reference.top_logprobs[position]}
        gap = known[reference.tokens[position]] - known.get(answer.tokens[position], -math.inf)
        found.append(Parting(index, position, gap))
    return found


def wrong(found: Sequence[Parting], bound: float = GAP) -> list[Parting]:
    """Those that rounding does not explain."""
    return [parting for parting in found if parting.gap > bound]
