"""What a request body says, as far as the gateway needs to know it.

Made where the body is parsed: here for short bodies, in a worker process for long ones, whose
parsed form never comes near the event loop.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json

from longleaf.gateway.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)

Route = Literal["chat_completions", "completions", "admission"]

MAX_PRIORITY = 100
_MAX_NAMES = 256
_MAX_OPTIONS = 4096
_TEMPLATE_TOKENS = 256
"""Room for what a chat template adds once (a default system prompt, the generation prompt)."""
_MESSAGE_TOKENS = 16
"""Room for what it adds to each message (role, separators)."""
_UNBOUNDED_FIELDS = frozenset(
    {"tools", "functions", "chat_template_kwargs", "documents", "chat_template"}
)
"""Fields that a template may render at more than their own length."""
_NOT_IN_PROMPT = frozenset(
    {
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "n", "seed"),
        *("stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "stop"),
        *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("min_tokens", "logprobs", "top_logprobs", "logit_bias", "user", "metadata", "store"),
        *("service_tier", "rid", "priority", "ignore_eos", "no_stop_trim", "cache_salt"),
        *("skip_special_tokens", "return_spec_tokens_details", "return_cached_tokens_details"),
        *("extra_key", "speculative", "chat_template_kwargs", "response_format", "regex", "ebnf"),
        *("parallel_tool_calls", "best_of", "echo", "suffix"),
    }
)
"""Fields that shape no prompt, or in a way that is known here."""
_PLAIN_MESSAGE = frozenset({"role", "content", "name"})
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})


class WrongBodyError(ValueError):
    """The body is no JSON object, or a field is wrong. Never quotes a value: it may be a prompt."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True)
class Inspection:
    """A valid body in short."""

    chat: bool
    model: str
    stream: bool
    usage_options: str | None
    """``stream_options`` that ask for a stream's usage, as JSON; ``None`` where the client asks, or
    wants no stream."""
    max_tokens: int | None
    """``max_completion_tokens``, or else ``max_tokens``."""
    completion_field: str
    """Which of the two it is."""
    completions: int
    """``n``, for each prompt."""
    prompts: int
    priority: int | None
    """0 where it is no whole number; ``None`` where it is not given."""
    bound: int | None
    """Most tokens of the prompt, by size alone; ``None`` where size says nothing."""
    given_tokens: int | None
    """Length of the longest prompt of token ids."""
    all_given_tokens: int | None
    plain: bool
    """Whether a tokenizer and chat template alone tell the prompt's tokens: no tools, no images,
    no field that we do not know."""
    names: tuple[str, ...]
    """Names of the body's fields, to say which one an engine complains of."""

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt."""
        return "messages" if self.chat else "prompt"


def parse(text: bytes, route: Route) -> dict[str, Any]:
    """The body's fields, checked; ``WrongBodyError`` names the one that is wrong."""
    try:
        fields = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise WrongBodyError(f"The body is not valid JSON: {error}.", None) from None
    if not isinstance(fields, dict):
        raise WrongBodyError("The body must be a JSON object.", None)
    chat = is_chat(fields, route)
    schema: type[GenerationRequest] = ChatCompletionRequest if chat else CompletionRequest
    # The other route's prompt means nothing on this one.
    fields.pop("prompt" if chat else "messages", None)
    try:
        schema.model_validate(fields)
    except ValidationError as error:
        raise _wrong_field(error) from None
    return fields


def is_chat(fields: Mapping[str, Any], route: Route) -> bool:
    """Whether the body is a chat; only ``admission`` takes both kinds."""
    if route == "admission":
        return "messages" in fields or "prompt" not in fields
    return route == "chat_completions"


def inspect(fields: Mapping[str, Any], body_bytes: int, route: Route) -> Inspection:
    """Sum up parsed ``fields``, whose text has ``body_bytes`` bytes."""
    chat = is_chat(fields, route)
    longest, total, prompts = _given_tokens(fields.get("prompt"))
    stream = bool(fields.get("stream"))
    return Inspection(
        chat=chat,
        model=str(fields["model"]),
        stream=stream,
        usage_options=_usage_options(fields.get("stream_options")) if stream else None,
        max_tokens=completion_limit(fields),
        completion_field=_completion_field(fields),
        completions=fields.get("n") or 1,
        prompts=prompts,
        priority=_priority(fields.get("priority")),
        bound=token_bound(fields, body_bytes),
        given_tokens=longest,
        all_given_tokens=total,
        plain=_plain(fields, chat),
        names=tuple([name for name in list(fields)[:_MAX_NAMES] if len(name) <= _MAX_NAMES]),
    )


def completion_limit(request: Mapping[str, Any]) -> int | None:
    """``max_completion_tokens``, or else ``max_tokens``."""
    value = request.get(_completion_field(request))
    return value if isinstance(value, int) else None


def _completion_field(request: Mapping[str, Any]) -> str:
    given = isinstance(request.get("max_completion_tokens"), int)
    return "max_completion_tokens" if given else "max_tokens"


def token_bound(request: Mapping[str, Any], body_bytes: int) -> int | None:
    """Most tokens that the prompt can have, judged by size alone; ``None`` where size says nothing
    (images and other parts that are not text, templates that take tools or arguments).

    A token of a byte-level tokenizer stands for at least one byte.
    """
    given = _UNBOUNDED_FIELDS.intersection(request)
    if given and any(request[name] for name in given):
        return None
    messages = request.get("messages")
    if messages is None:
        return body_bytes + _MESSAGE_TOKENS
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text":
                    return None
    return body_bytes + _TEMPLATE_TOKENS + _MESSAGE_TOKENS * len(messages)


def _usage_options(given: Mapping[str, Any] | None) -> str | None:
    if given and given.get("include_usage"):
        return None
    text = json.dumps({**(given or {}), "include_usage": True})
    return text if len(text) <= _MAX_OPTIONS else '{"include_usage": true}'


def _priority(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        return 0  # what an engine makes of it is not known
    return max(-MAX_PRIORITY, min(value, MAX_PRIORITY))


def _given_tokens(prompt: object) -> tuple[int | None, int | None, int]:
    """Tokens of the longest prompt of ids and of all, and the number of prompts."""
    if not isinstance(prompt, list) or not prompt:
        return None, None, 1
    if isinstance(prompt[0], int):
        return len(prompt), len(prompt), 1
    if isinstance(prompt[0], list):
        lengths = [len(tokens) for tokens in prompt]
        return max(lengths), sum(lengths), len(prompt)
    return None, None, len(prompt)


def _plain(fields: Mapping[str, Any], chat: bool) -> bool:
    for name, value in fields.items():
        if value and name not in _NOT_IN_PROMPT:
            return False
    return not chat or all(map(_plain_message, fields["messages"]))


def _plain_message(message: Mapping[str, Any]) -> bool:
    if message.get("role") not in _PLAIN_ROLES:
        return False
    for name, value in message.items():
        if value is not None and name not in _PLAIN_MESSAGE:
            return False
    content = message.get("content")
    if isinstance(content, list):
        return all(part.get("type") == "text" and _is_text(part) for part in content)
    return isinstance(content, str)


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.keys() == {"type", "text"} and isinstance(part["text"], str)


def _wrong_field(error: ValidationError) -> WrongBodyError:
    """The first wrong field."""
    first = error.errors(include_input=False, include_url=False)[0]
    location = [part for part in first["loc"] if not _names_a_type(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = path.removeprefix(".")
    if first["type"] == "missing":
        return WrongBodyError(f"Missing required parameter: {path!r}.", path)
    return WrongBodyError(f"Invalid value for {path!r}: {first['msg']}.", path)


def _names_a_type(part: int | str) -> bool:
    """Whether a part of pydantic's location is a member of a union, not a field."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)
