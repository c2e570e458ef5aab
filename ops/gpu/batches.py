"""What a curve for `longleaf simulate` is made of: prefills, and steps of answers together."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ops.gpu.client import Client
from ops.gpu.record import Record
from ops.gpu.timing import SKIPPED_EVENTS, random_prompt

_LEAST = 32
"""Steps that all answers must share."""
_ANSWER = 256
"""Tokens of an answer."""


def shared_steps(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds of one step, and how many there were, while every stream was decoding.

    times: when each stream's events came, in seconds of one clock; one event a step and stream.

    Raises:
        ValueError: where the streams shared fewer than 32 steps.
    """
    begin = max(stream[SKIPPED_EVENTS] for stream in times)
    end = min(stream[-2] for stream in times)
    counts = [bisect_right(stream, end) - bisect_left(stream, begin) - 1 for stream in times]
    steps = statistics.fmean(counts)
    if steps < _LEAST:
        raise ValueError(f"{len(times)} answers shared {steps:.0f} steps of at least {_LEAST}")
    return (end - begin) / steps, steps


def measure_batches(
    record: Record,
    client: Client,
    server: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    pool_tokens: int,
) -> None:
    """Time the prefill of each context, and steps of each batch as ``pool_tokens`` hold it.

    Prompts have nothing in common, so that no step reads a row of the cache for two of them.
    """
    for context in contexts:
        most = max(batch for batch in batches if batch * context <= pool_tokens)
        prompts = [random_prompt(context, 1 + context + number) for number in range(most)]
        firsts = [client.generate(prompt, 1, timeout=600) for prompt in prompts]
        record.add(
            "prefills",
            server=server,
            context=context,
            cached=max(first.cached_tokens for first in firsts),
            seconds=round(statistics.median(first.first_token_seconds for first in firsts), 4),
            n=most,
        )
        for batch in batches:
            if batch > most:
                break
            timed = [shared_steps(_answer_all(client, prompts[:batch])) for _ in range(3)]
            seconds = sorted(seconds for seconds, _ in timed)
            record.add(
                "batches",
                server=server,
                context=context,
                batch=batch,
                ms=round(1e3 * seconds[1], 3),
                spread=[round(1e3 * seconds[0], 3), round(1e3 * seconds[2], 3)],
                steps=round(sum(steps for _, steps in timed)),
            )


def _answer_all(client: Client, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """When the events of each prompt's answer came, all asked at once, in one clock's seconds."""

    def ask(prompt: Sequence[int]) -> list[float]:
        answer = client.generate(prompt, _ANSWER, timeout=600)
        return [answer.begin + event.at for event in answer.events]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))
