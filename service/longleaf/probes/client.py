"""One streamed completion, and what its answer says of the steps behind it."""

import json
import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp


class ProbeError(RuntimeError):
    """The server did not answer as it should; the message says how."""


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
    SGLang 0.5.17 leaves them out of what its OpenAI routes answer.
    """

    url: str
    model: str
    native: bool = False


async def find_server(http: aiohttp.ClientSession, url: str) -> Server:
    """What is at ``url``; ``ProbeError`` if it is no OpenAI server."""
    try:
        async with http.get(f"{url}/v1/models") as answer:
            body = await answer.json()
            model = str(body["data"][0]["id"])
        async with http.get(f"{url}/generate") as answer:
            return Server(url, model, native=answer.status == 405)
    except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, ValueError) as error:
        raise ProbeError(f"{url}/v1/models: {type(error).__name__}: {error}") from error


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
        async with http.post(server.url + path, json=body) as answer:
            if answer.status != 200:
                raise ProbeError(f"status {answer.status}: {_message(await answer.text())}")
            async for line in answer.content:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]" or not line.startswith(b"data: "):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ProbeError(str(chunk["error"].get("message", chunk["error"])))
                if stream.take(chunk):
                    stream.times.append(time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProbeError(f"{type(error).__name__}: {error}") from error
    if not stream.usage or not stream.times:
        raise ProbeError("the stream had no text or no usage")
    return stream.answer(began)


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
        steps = int(details.get("steps", details.get("spec_verify_ct", 0)))
        reported = float(details.get("commit_len", details.get("spec_accept_length", 0.0)))
        return _answer(self.usage, details, steps, reported, self.times, began)


class _Native:
    """Reads chunks of /generate: each repeats the text, and the counts, so far."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}

    def take(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk carries tokens."""
        before = self.usage.get("completion_tokens", 0)
        self.usage = chunk.get("meta_info") or self.usage
        return bool(self.usage.get("completion_tokens", 0) > before)

    def answer(self, began: float) -> Answer:
        """``spec_accept_length`` counts the first token, which prefill gives, among the steps'."""
        told = self.usage
        steps = int(told.get("spec_verify_ct", 0))
        length = float(told.get("spec_accept_length", 0.0))
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
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=int(usage["completion_tokens"]),
        steps=steps,
        commit_len=commit_len,
        correct_drafts=int(details.get("spec_num_correct_drafts", 0)),
        proposed_drafts=int(details.get("spec_num_proposed_drafts", 0)),
        events=len(times),
        first_seconds=times[0] - began,
        decode_seconds=times[-1] - times[0],
    )


def _message(text: str) -> str:
    try:
        body = json.loads(text)
        return str(body.get("error", body).get("message", text))[:300]
    except (ValueError, AttributeError):
        return text[:300]


_SAMPLE = re.compile(r"^(longleaf_[a-z_]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_BUCKET = re.compile(r'context_bucket="([^"]*)"')
_ENGINE = {"longleaf_commit_len_count", "longleaf_kv_read_bytes_total"}


async def engine_metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float] | None:
    """The engine's families, summed over labels (``name``) and for each context bucket
    (``name@16k``); None where ``url`` does not serve them.
    """
    try:
        async with http.get(url) as answer:
            text = await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return None
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name.endswith("_bucket"):
            continue
        bucket = _BUCKET.search(labels)
        for key in (name, f"{name}@{bucket[1]}" if bucket else ""):
            if key:
                found[key] = found.get(key, 0.0) + float(value)
    return found if _ENGINE & set(found) else None
