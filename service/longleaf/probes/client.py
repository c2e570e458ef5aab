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


async def model_name(http: aiohttp.ClientSession, url: str) -> str:
    """The served model; ``ProbeError`` if ``url`` is no OpenAI server."""
    try:
        async with http.get(f"{url}/v1/models") as answer:
            body = await answer.json()
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, ValueError) as error:
        raise ProbeError(f"{url}/v1/models: {type(error).__name__}: {error}") from error


async def complete(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Answer:
    """Stream a completion of ``prompt`` to exactly ``max_tokens``; ``ProbeError`` if refused."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
    }
    began = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] | None = None
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise ProbeError(f"status {answer.status}: {_message(await answer.text())}")
            async for line in answer.content:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]" or not line.startswith(b"data: "):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ProbeError(str(chunk["error"].get("message", chunk["error"])))
                if any(choice.get("text") for choice in chunk.get("choices", ())):
                    times.append(time.perf_counter())
                usage = chunk.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProbeError(f"{type(error).__name__}: {error}") from error
    if usage is None or not times:
        raise ProbeError("the stream had no text or no usage")
    return _answer(usage, times, began)


def _answer(usage: dict[str, Any], times: list[float], began: float) -> Answer:
    details = usage.get("spec_tokens_details") or {}
    steps = int(details.get("steps", details.get("spec_verify_ct", 0)))
    return Answer(
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=int(usage["completion_tokens"]),
        steps=steps,
        commit_len=float(details.get("commit_len", details.get("spec_accept_length", 0.0))),
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
