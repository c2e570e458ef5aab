"""Answers as SGLang writes them: one JSON object, or the chunks of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from longleaf.embedded.request import Finish, GenerationRequest, StepEvent
from longleaf.embedded.sampling import TokenLogprob
from longleaf.embedded.server.protocol import ChatBody, CompletionBody
from longleaf.embedded.server.usage import extension_body, last_usage_body, usage_body
from longleaf.embedded.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_METADATA = {"weight_version": "default"}


class Renderer(Protocol):
    """Writes one request's answer."""

    def whole(self, event: StepEvent) -> dict[str, Any]:
        """The JSON object of a finished answer, given as one event."""

    def chunks(self, event: StepEvent) -> Iterator[bytes]:
        """What a stream sends for ``event``; called for every event in turn."""


def data(body: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class ChatRenderer:
    """Chat completions."""

    def __init__(
        self,
        body: ChatBody,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        fingerprint: str | None = None,
    ) -> None:
        self._body = body
        self._fingerprint = _fingerprint(fingerprint)
        self._id = request.rid
        self._tokenizer = tokenizer
        self._begun = False
        self._logprobs: list[TokenLogprob] = []

    def whole(self, event: StepEvent) -> dict[str, Any]:
        """See ``Renderer``."""
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": event.text,
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": self._logprobs_body(event.logprobs) if self._body.logprobs else None,
            **_ending(event.finish),
        }
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": last_usage_body(event.usage, self._body),
            "metadata": _METADATA,
            **_extension(extension_body(event.usage, self._body)),
        }

    def chunks(self, event: StepEvent) -> Iterator[bytes]:
        """See ``Renderer``."""
        options = self._body.stream_options
        if not self._begun:
            self._begun = True
            yield self._chunk({"role": "assistant", "content": ""}, None, None)
        self._logprobs.extend(event.logprobs)
        if event.text:
            usage = usage_body(event.usage) if options.continuous_usage_stats else None
            yield self._chunk({"content": event.text}, None, usage)
        if event.finish is None:
            return
        yield self._chunk({}, event.finish, None)
        extension = extension_body(event.usage, self._body)
        head = self._head("chat.completion.chunk")
        if extension is not None:
            yield data({**head, "choices": [], "sglext": extension})
        if options.include_usage:
            yield data({**head, "choices": [], "usage": last_usage_body(event.usage, self._body)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": int(time.time()),
            "model": self._body.model,
            **self._fingerprint,
        }

    def _chunk(
        self, delta: dict[str, Any], finish: Finish | None, usage: dict[str, Any] | None
    ) -> bytes:
        # Log-probabilities wait for a chunk that carries text, or for the last one.
        carries = bool(self._logprobs) and ("role" not in delta)
        choice = {
            "index": 0,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": self._logprobs_body(self._logprobs) if carries else None,
            **_ending(finish),
        }
        if carries:
            self._logprobs = []
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return data(chunk if usage is None else {**chunk, "usage": usage})

    def _logprobs_body(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._logprob_body(entry.token, entry.logprob),
                    "top_logprobs": [self._logprob_body(*other) for other in entry.top],
                }
                for entry in logprobs
            ]
        }

    def _logprob_body(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": logprob}


class CompletionRenderer:
    """Completions."""

    def __init__(
        self,
        body: CompletionBody,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        fingerprint: str | None = None,
    ) -> None:
        self._body = body
        self._fingerprint = _fingerprint(fingerprint)
        self._id = request.rid
        self._tokenizer = tokenizer
        self._created = int(time.time())

    def whole(self, event: StepEvent) -> dict[str, Any]:
        """See ``Renderer``."""
        return {
            **self._head(),
            "choices": [self._choice(event)],
            "usage": last_usage_body(event.usage, self._body),
            "metadata": _METADATA,
            **_extension(extension_body(event.usage, self._body)),
        }

    def chunks(self, event: StepEvent) -> Iterator[bytes]:
        """See ``Renderer``."""
        options = self._body.stream_options
        usage = usage_body(event.usage) if options.continuous_usage_stats else None
        yield data({**self._head(), "choices": [self._choice(event)], "usage": usage})
        if event.finish is None:
            return
        extension = extension_body(event.usage, self._body)
        if extension is not None:
            yield data({**self._head(), "choices": [], "usage": None, "sglext": extension})
        if options.include_usage:
            last = last_usage_body(event.usage, self._body)
            kept = {name: value for name, value in last.items() if value is not None}
            yield data({**self._head(), "choices": [], "usage": kept})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            **self._fingerprint,
        }

    def _choice(self, event: StepEvent) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = {
                "text_offset": [-1] * len(event.logprobs),
                "token_logprobs": [entry.logprob for entry in event.logprobs],
                "tokens": [self._text(entry.token) for entry in event.logprobs],
                "top_logprobs": [
                    {self._text(token): logprob for token, logprob in entry.top}
                    for entry in event.logprobs
                ],
            }
        return {"index": 0, "text": event.text, "logprobs": logprobs, **_ending(event.finish)}

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def _fingerprint(fingerprint: str | None) -> dict[str, str]:
    return {} if fingerprint is None else {"system_fingerprint": fingerprint}


def _ending(finish: Finish | None) -> dict[str, Any]:
    return {
        "finish_reason": None if finish is None else str(finish.kind),
        "matched_stop": None if finish is None else finish.matched,
    }


def _extension(extension: dict[str, Any] | None) -> dict[str, Any]:
    return {} if extension is None else {"sglext": extension}
