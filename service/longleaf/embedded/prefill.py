"""Chunked prefill: compute KV rows of prompts, a bounded number of tokens at a time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longleaf.ddtree import draw, target_distribution
from longleaf.embedded.model_set import Models
from longleaf.embedded.request import Finish, RequestState
from longleaf.embedded.sampling import TokenLogprob, position_uniforms, token_logprobs
from longleaf.embedded.slots import Slots
from longleaf.embedded.target import Segment


@dataclass(frozen=True, slots=True)
class Chunk:
    """``slots`` int64 [T] for the next T tokens of ``state``."""

    state: RequestState
    slots: Slots


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A chunk's outcome; with the prompt's last chunk comes the answer's first token."""

    state: RequestState
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """``hidden`` and ``features`` float32 [T, …] of each chunk's tokens, bytes of latent rows read,
    seconds taken.
    """

    hidden: list[NDArray[np.float32]]
    features: list[NDArray[np.float32]]
    kv_bytes_read: int
    seconds: float


def forward_chunks(models: Models, chunks: Sequence[Chunk]) -> PrefillOutput:
    """Run the target over all ``chunks`` in one forward. Changes no request."""
    begin = time.perf_counter()
    segments = []
    for chunk in chunks:
        start = chunk.state.kv.length
        end = start + len(chunk.slots)
        segments.append(
            Segment(
                chunk.state.tokens[start:end],
                np.arange(start, end, dtype=np.int64),
                chunk.slots,
                chunk.state.kv.slots,
                None,
            )
        )
    output = models.target.forward(segments, models.pool)
    cuts = np.cumsum([len(chunk.slots) for chunk in chunks])[:-1]
    return PrefillOutput(
        np.split(output.hidden, cuts),
        np.split(output.features, cuts),
        output.kv_bytes_read,
        time.perf_counter() - begin,
    )


def finish_chunk(
    models: Models,
    chunk: Chunk,
    hidden: NDArray[np.float32],
    features: NDArray[np.float32],
) -> PrefillResult:
    """Extend the draft K/V by the chunk, give its rows to the request, and choose the first token
    if it is due.
    """
    state = chunk.state
    start = state.kv.length
    end = start + len(chunk.slots)
    if models.drafter is not None and state.request.speculative:
        span = np.arange(start, end, dtype=np.int64)
        models.drafter.extend(features, span, chunk.slots, models.pool)
    first = end == state.prompt_len and state.completion_len == 0
    logits = models.target.logits(hidden[-1:]) if first else None
    if logits is not None and not np.isfinite(logits).all():
        raise FloatingPointError("the target's logits are not finite")
    state.kv.append(chunk.slots)
    if logits is None:
        return PrefillResult(state, (), (), None)
    token = _choose(state, logits[0])
    finish = state.commit(token, models.eos_ids)
    logprobs: list[TokenLogprob] = []
    if state.request.logprobs is not None:
        logprobs = token_logprobs(logits, [token], state.request.logprobs)
    return PrefillResult(state, (token,), tuple(logprobs), finish)


def _choose(state: RequestState, logits: NDArray[np.float32]) -> int:
    sampling = state.request.sampling
    if sampling.greedy:
        return int(logits.argmax())
    uniform = position_uniforms(state.request.seed, state.length, 1)[0]
    return draw(target_distribution(logits, sampling), float(uniform))
