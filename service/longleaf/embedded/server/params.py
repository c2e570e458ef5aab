"""From a request body to a generation request: limits checked and named as SGLang names them."""

import math
import secrets
import uuid
from collections.abc import Sequence

import numpy as np

from longleaf.ddtree import SamplingParams
from longleaf.embedded.request import GenerationRequest
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.protocol import ChatBody, CompletionBody, GenerationBody

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_RID_LENGTH = 256


def check_chat(body: ChatBody, context_length: int) -> int | None:
    """Refuse what a chat request must not ask; returns its token limit."""
    if not body.messages:
        raise ApiError("Messages cannot be empty.")
    for message in body.messages:
        parts = message.content if isinstance(message.content, list) else []
        for part in parts:
            if part.type != "text":
                raise ApiError(
                    f"Model only supports text input; received unsupported content type "
                    f"'{part.type}'."
                )
    if body.continue_final_message:
        raise ApiError("continue_final_message is not supported.")
    if not body.logprobs and body.top_logprobs:
        raise ApiError("top_logprobs needs logprobs to be true.")
    limit = body.max_completion_tokens or body.max_tokens
    if limit is None and 0 in (body.max_completion_tokens, body.max_tokens):
        limit = 0
    if limit is not None and limit > context_length:
        raise ApiError(
            f"max_completion_tokens is too large: {limit}."
            f"This model supports at most {context_length} completion tokens."
        )
    return limit


def check_completion(body: CompletionBody, vocab_size: int) -> str | Sequence[int]:
    """Refuse what a completion request must not ask; returns its one prompt, as text or ids."""
    for name, asked in (
        ("best_of", body.best_of not in (None, 1)),
        ("echo", body.echo),
        ("suffix", bool(body.suffix)),
        ("json_schema", bool(body.json_schema)),
    ):
        if asked:
            raise ApiError(f"{name} is not supported.")
    prompt = body.prompt
    if not prompt or (
        isinstance(prompt, list) and isinstance(prompt[0], (str, list)) and not prompt[0]
    ):
        raise ApiError("Prompt cannot be empty")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return _checked_ids([token for token in prompt if isinstance(token, int)], vocab_size)
    if len(prompt) > 1:
        raise ApiError(f"prompt must be one prompt: a batch of {len(prompt)} is not supported.")
    return prompt[0] if isinstance(prompt[0], str) else _checked_ids(prompt[0], vocab_size)


def _checked_ids(ids: list[int], vocab_size: int) -> list[int]:
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ApiError(f"The prompt has token ids outside 0..{vocab_size - 1}.")
    return ids


def check_lengths(prompt_len: int, max_tokens: int | None, context_length: int) -> None:
    """Refuse what can never fit the model's context."""
    if prompt_len >= context_length:
        raise ApiError(
            f"The input ({prompt_len} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )
    if max_tokens is not None and prompt_len + max_tokens > context_length:
        raise ApiError(
            f"Requested token count exceeds the model's maximum context length of "
            f"{context_length} tokens. You requested a total of {prompt_len + max_tokens} tokens: "
            f"{prompt_len} tokens from the input messages and {max_tokens} tokens for the "
            f"completion. Please reduce the number of tokens in the input messages or the "
            f"completion to fit within the limit."
        )


def generation_request(
    body: GenerationBody,
    prompt: Sequence[int],
    max_tokens: int | None,
    logprobs: int | None,
    defaults: SamplingParams,
) -> GenerationRequest:
    """Build the engine's request; ``ApiError`` names a field that is out of range or
    not supported. ``defaults`` fill in what the body leaves out.
    """
    _check_unsupported(body)
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}.")
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise ApiError(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {logprobs}.")
    if body.rid is not None and not 1 <= len(body.rid) <= MAX_RID_LENGTH:
        raise ApiError(f"rid must have 1 to {MAX_RID_LENGTH} characters, got {len(body.rid)}.")
    return GenerationRequest(
        rid=body.rid or uuid.uuid4().hex,
        prompt=np.asarray(prompt, dtype=np.int64),
        sampling=_sampling(body, defaults),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        stop=_stop(body),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        keep_stop=body.no_stop_trim,
        logprobs=logprobs,
        speculative=body.speculative,
        cache_salt=(body.cache_salt or "") + (body.extra_key or ""),
        text=str((body.metadata or {}).get("text", "")),
    )


def _sampling(body: GenerationBody, defaults: SamplingParams) -> SamplingParams:
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    top_k = defaults.top_k if body.top_k is None else body.top_k
    min_p = defaults.min_p if body.min_p is None else body.min_p
    if not math.isfinite(temperature) or temperature < 0.0:
        raise ApiError(f"temperature must be a non-negative finite number, got {temperature}.")
    if not 0.0 < top_p <= 1.0:
        raise ApiError(f"top_p must be in (0, 1], got {top_p}.")
    if top_k < 1 and top_k != -1:
        raise ApiError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    if not 0.0 <= min_p <= 1.0:
        raise ApiError(f"min_p must be in [0, 1], got {min_p}.")
    return SamplingParams(temperature, top_p, top_k, min_p)


def _stop(body: GenerationBody) -> tuple[str, ...]:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise ApiError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}.")
    if "" in stop:
        raise ApiError("stop must not contain an empty string.")
    return stop


def _check_unsupported(body: GenerationBody) -> None:
    if body.n != 1:
        raise ApiError(f"n must be 1 (one answer a request), got {body.n}.")
    for name, asked in (
        ("frequency_penalty", body.frequency_penalty != 0.0),
        ("presence_penalty", body.presence_penalty != 0.0),
        ("repetition_penalty", body.repetition_penalty != 1.0),
        ("min_tokens", body.min_tokens != 0),
        ("logit_bias", bool(body.logit_bias)),
        ("response_format", body.response_format.type != "text"),
        ("regex", bool(body.regex)),
        ("ebnf", bool(body.ebnf)),
        ("stop_regex", bool(body.stop_regex)),
    ):
        if asked:
            raise ApiError(f"{name} is not supported by the embedded engine.")
