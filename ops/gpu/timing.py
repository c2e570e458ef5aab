"""Step times from a stream's events, at batch 1; tokens from usage, never from events."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.gpu.client import Client, Generation

SKIPPED_EVENTS = 3
"""First events left out: prefill, and the overlap schedule filling up."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Time of decode steps. ms: median over events; spread: its quartiles; mean_ms: total / steps.

    The median is of gaps between events, one event a step; ``mean_ms`` divides the whole decode
    time by the steps that the server counted, so that the two disagree where events coalesce.
    """

    ms: float
    spread: tuple[float, float]
    mean_ms: float
    steps: int
    tokens_per_step: float

    def __str__(self) -> str:
        return (
            f"{self.ms:7.2f} ms a step (quartiles {self.spread[0]:.2f}, {self.spread[1]:.2f}; "
            f"mean {self.mean_ms:.2f} over {self.steps}), {self.tokens_per_step:.2f} tokens a step"
        )


def random_prompt(length: int, seed: int = 7) -> list[int]:
    """Token ids that say nothing; a longer prompt of one seed begins with the shorter one."""
    draw = random.Random(seed)
    return [draw.randrange(20, 4000) for _ in range(length)]


def step_timing(generation: Generation) -> StepTiming:
    """Read the step time off an answer's events."""
    times = np.asarray([event.at for event in generation.events])
    steps = generation.steps or len(generation.tokens) - 1
    if len(times) < SKIPPED_EVENTS + 4:
        raise ValueError(f"{len(times)} events are too few to time steps")
    gaps = 1e3 * np.diff(times[SKIPPED_EVENTS:-1])
    low, median, high = np.percentile(gaps, (25, 50, 75))
    return StepTiming(
        ms=round(float(median), 3),
        spread=(round(float(low), 3), round(float(high), 3)),
        mean_ms=round(1e3 * float(times[-1] - times[0]) / steps, 3),
        steps=steps,
        tokens_per_step=round((len(generation.tokens) - 1) / steps, 3),
    )


def time_steps(client: Client, prompt: Sequence[int], tokens: int) -> StepTiming:
    """Decode ``tokens`` after a prompt (cached, if it was sent before) and time the steps."""
    return step_timing(client.generate(prompt, tokens, timeout=600))


def first_token_seconds(client: Client, prompt: Sequence[int]) -> tuple[float, int]:
    """Time of a prompt's prefill and one token; returns it with the tokens found in the cache."""
    answer = client.generate(prompt, 1, timeout=600)
    return answer.first_token_seconds, answer.cached_tokens
