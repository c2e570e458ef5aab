"""One streamed completion, and what its answer says of the steps behind it."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError


class ProbeError(RuntimeError):
    """The server did not answer as it should; the message says how."""


_FIRST_SECONDS = 30.0
_ONE_EACH = 0.8
"""Events that an answer's tokens come in, at least, where each is a step: some may hold back text
that is no whole character yet.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """``steps`` and ``commit_len`` as the answer reports them; times in seconds.

    ``events``: chunks that carried text. ``decode_seconds``: from the first of them to the last.
    """

    prompt_tokens: int
    completion_tokens: int
    steps: int
    commit_len: float
    correct_drafts: int
    proposed_drafts: int
    events: int
    first_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Server:
    """Where completions come from. ``native``: SGLang's own /generate is there, which tells steps;
    SGLang 0.5.17 leaves them out of what its OpenAI routes answer. ``limit``: tokens of a prompt
    and its answer, None where /v1/models does not tell. ``headers``: the key, which no one else is
    shown.
    """

    url: str
    model: str
    native: bool = False
    limit: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def room(self, max_tokens: int) -> int | None:
        """Tokens that a prompt may have beside an answer; None where nobody tells."""
        return None if self.limit is None else self.limit - max_tokens

    def refuses(self, context: int, max_tokens: int) -> str:
        """Why ``context`` tokens and an answer are too many; empty if they are not."""
        room = self.room(max_tokens)
        if room is None or context <= room:
            return ""
        return f"longer than the server's {self.limit} tokens, answer included"


def session(timeout: float) -> aiohttp.ClientSession:
    """Requests of ``timeout`` seconds each at most."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout))


async def find_server(http: aiohttp.ClientSession, url: str, api_key: str | None = None) -> Server:
    """What is at ``url``, which is shown the key; ``ProbeError`` if it is no OpenAI server."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    where = f"{url}/v1/models"
    try:
        async with asyncio.timeout(_FIRST_SECONDS):
            async with http.get(where, headers=headers) as answer:
                if answer.status in (401, 403):
                    raise ProbeError(
                        f"{where}: status {answer.status}: give the key (--api-key), or another"
                    )
                if answer.status == 404:
                    raise ProbeError(f"{where}: status 404: is it an OpenAI server?")
                if answer.status != 200:
                    said = _message(await answer.text())
                    raise ProbeError(f"{where}: status {answer.status}: {said}")
                card = (await answer.json())["data"][0]
                model, limit = str(card["id"]), card.get("max_model_len")
            async with http.get(f"{url}/generate", headers=headers) as answer:
                native = answer.status == 405
    except TimeoutError as error:
        raise ProbeError(f"{where}: no answer in {_FIRST_SECONDS:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ProbeError(f"{where}: {type(error).__name__}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProbeError(f"{where} lists no model: is it an OpenAI server?") from error
    limit = limit if isinstance(limit, int) and limit > 0 else None
    return Server(url, model, native, limit, headers)


async def complete(
    http: aiohttp.ClientSession,
    server: Server,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Answer:
    """Stream a completion of ``prompt`` to exactly ``max_tokens``; ``ProbeError`` if refused."""
    asked = _Asked(prompt, max_tokens, temperature, seed)
    path, body = (
        ("/generate", asked.native())
        if server.native
        else ("/v1/completions", asked.openai(server.model))
    )
    stream = _Native() if server.native else _OpenAi()
    began = time.perf_counter()
    try:
        async with http.post(server.url + path, json=body, headers=server.headers) as answer:
            if answer.status != 200:
                raise ProbeError(f"status {answer.status}: {_message(await answer.text())}")
            async for line in answer.content:
                chunk = _chunk(line)
                if chunk and stream.take(chunk):
                    stream.times.append(time.perf_counter())
        if not stream.usage or not stream.times:
            raise ProbeError("the stream had no text or no usage")
        return stream.answer(began)
    except TimeoutError as error:
        raise ProbeError("no answer in time (--timeout)") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ProbeError(f"{type(error).__name__}: {error}") from error
    except (HttpProcessingError, ValueError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ProbeError(f"the stream is not understood: {why}") from error


def steps_of(answer: Answer) -> int:
    """Steps that ``answer.decode_seconds`` are of; an engine that does not speculate reports none,
    and takes one a token. ``ProbeError`` where they cannot be told.
    """
    if not answer.steps and answer.events < _ONE_EACH * answer.completion_tokens:
        raise ProbeError(
            f"{answer.completion_tokens} tokens came in {answer.events} events and no steps are "
            "told (SGLang's are told by an engine's URL)"
        )
    if answer.steps and not answer.events - 1 <= answer.steps <= answer.completion_tokens:
        raise ProbeError(
            f"the answer reports {str(answer.steps)[:12]} steps, of {answer.completion_tokens} "
            f"tokens in {answer.events} events"
        )
    steps = answer.steps or answer.completion_tokens - 1
    if steps < 1 or answer.decode_seconds <= 0:
        raise ProbeError("the answer has too few steps to time: raise --max-tokens")
    return steps


@dataclass(frozen=True, slots=True)
class _Asked:
    """A completion, in either API's words."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def openai(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_spec_tokens_details": True,
        }

    def native(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
        }
        if self.temperature > 0:
            sampling["sampling_seed"] = self.seed
        return {"text": self.prompt, "sampling_params": sampling, "stream": True}


class _OpenAi:
    """Reads chunks of /v1/completions."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}

    def take(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk carries text."""
        self.usage = chunk.get("usage") or self.usage
        return any(choice.get("text") for choice in chunk.get("choices", ()))

    def answer(self, began: float) -> Answer:
        details = self.usage.get("spec_tokens_details") or {}
        if not isinstance(details, dict):
            raise ProbeError(f"spec_tokens_details is no object: {details!r}")
        steps = _whole(details, "steps" if "steps" in details else "spec_verify_ct")
        length = "commit_len" if "commit_len" in details else "spec_accept_length"
        reported = _number(details, length)
        return _answer(self.usage, details, steps, reported, self.times, began)


class _Native:
    """Reads chunks of /generate: each repeats the text, and the counts, so far."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}

    def take(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk carries tokens."""
        before = _whole(self.usage, "completion_tokens")
        self.usage = chunk.get("meta_info") or self.usage
        return _whole(self.usage, "completion_tokens") > before

    def answer(self, began: float) -> Answer:
        """``spec_accept_length`` counts the first token, which prefill gives, among the steps'."""
        told = self.usage
        steps = _whole(told, "spec_verify_ct")
        length = _number(told, "spec_accept_length")
        reported = (length * steps - 1) / steps if steps else 0.0
        return _answer(told, told, steps, reported, self.times, began)


def _answer(
    usage: dict[str, Any],
    details: dict[str, Any],
    steps: int,
    commit_len: float,
    times: list[float],
    began: float,
) -> Answer:
    return Answer(
        prompt_tokens=_whole(usage, "prompt_tokens", least=1),
        completion_tokens=_whole(usage, "completion_tokens", least=1),
        steps=steps,
        commit_len=commit_len,
        correct_drafts=_whole(details, "spec_num_correct_drafts"),
        proposed_drafts=_whole(details, "spec_num_proposed_drafts"),
        events=len(times),
        first_seconds=times[0] - began,
        decode_seconds=times[-1] - times[0],
    )


def _chunk(line: bytes) -> dict[str, Any] | None:
    """What a line of the stream carries; ``ProbeError`` if that is an error."""
    data = line.removeprefix(b"data: ").strip()
    if data == line.strip() or data == b"[DONE]":
        return None
    chunk = json.loads(data)
    if not isinstance(chunk, dict):
        raise ValueError(f"{str(chunk)[:100]!r} is no object")
    if chunk.get("error"):
        raise ProbeError(_message(data.decode()))
    return chunk


def _whole(found: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = found.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ProbeError(f"the answer's {name} is {value!r}, no count from {least} on")
    return value


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name, 0.0)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ProbeError(f"the answer's {name} is {value!r}, no number")
    return float(value)


def _message(text: str) -> str:
    """What an error's body says."""
    try:
        error = json.loads(text)
        for name in ("error", "message"):
            error = error.get(name, error) if isinstance(error, dict) else error
        return str(error)[:300]
    except ValueError:
        return text[:300]
