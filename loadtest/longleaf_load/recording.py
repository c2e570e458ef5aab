"""Records an engine's curve and its commit_len, for ``longleaf simulate`` to go by.

Prefill is the engine's own busy time (``/v1/loads``). A step is the time between the events of
streams that decode together, so it has all in it that a step takes; where they did not, nothing is
recorded. Nothing else may run on the engine meanwhile. commit_len goes first: in a KV pool that
answers have come and gone in, an engine may be slower than in a fresh one (rows that lie apart).
"""

import http.client
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from longleaf_load.lengths import Even, Lengths, PlanError
from longleaf_load.prompts import KINDS, PromptSource

_SECONDS = 600.0
_ANSWER = 160
"""Tokens of an answer: enough steps to take a median of."""
_AROUND = 32
"""Tokens that a stream may need beside its prompt and its answer."""
_REPEATS = 3
"""Of each measurement; their median counts."""
_FEWEST_STEPS = 3
_LOCAL = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True, slots=True)
class _Answer:
    """When its events came; accepted drafts by number of steps."""

    times: list[float]
    histogram: list[int]


class Recorder:
    """Measures one engine at ``url``, directly. ``tell`` is called with each finding."""

    def __init__(
        self, url: str, model: str, source: PromptSource, seed: int, tell: Callable[[str], None]
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise PlanError(f"{url!r} is no URL like http://host:30000")
        self._url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self._model = model
        self._source = source
        self._seed = seed
        self._random = random.Random(seed)
        self._tell = tell

    def about(self, machine: str | None) -> dict[str, Any]:
        """What was recorded: the engine by its own word, and ``machine``, on which it runs (by
        default this one, where the engine is on it, too). An engine that is simulated says so.
        """
        info = self._info()
        names = ("version", "model_path", "device", "max_running_requests")
        about: dict[str, Any] = {"engine": {name: info.get(name) for name in names}}
        if machine is not None or self._host not in _LOCAL:
            about["machine"] = machine
        if info.get("simulated"):
            about["simulated"] = str(info["simulated"])
            self._tell(f"{self._url} is no engine but simulated, {about['simulated']}")
        return about

    def check(self, contexts: Sequence[int], batches: Sequence[int]) -> None:
        """``PlanError`` names what the engine cannot run."""
        pool = int(self._load()["max_total_num_tokens"])
        _check(contexts, batches, pool, self._info().get("max_running_requests"))

    def curve(self, contexts: Sequence[int], batches: Sequence[int]) -> dict[str, Any]:
        """``steps`` and ``prefill`` of a curve, and what the engine says of itself."""
        info = self._info()
        load = self._load()
        pool = int(load["max_total_num_tokens"])
        size = load.get("memory", {}).get("kv_cache_gb", 0.0) * 2**30
        return {
            "nodes": info.get("speculative_num_draft_tokens") or 1,
            "kv_bytes_per_token": max(1.0, size / pool),
            "steps": [
                {"context": context, "batch": batch, "seconds": self._step(context, batch)}
                for batch in batches
                for context in contexts
                if self._fits(context, batch, pool)
            ],
            "prefill": [
                {"context": context, "cached": 0, "seconds": self._prefill(context)}
                for context in contexts
            ],
        }

    def commits(self, prompts: Lengths, lengths: Lengths, answers: int) -> dict[str, list[int]]:
        """Steps by accepted drafts, for each kind of text, of ``answers`` answers.

        Both lengths should be the traffic's: a model that falls into repetition drafts the end of
        a long answer far better than a short one, and copies more of a long prompt.
        """
        kinds = {}
        for kind in KINDS:
            rows = [
                self._ask(
                    kind, self._prompt_length(prompts, number), lengths.draw(self._random)
                ).histogram
                for number in range(answers)
            ]
            width = max(map(len, rows))
            counts = [sum(row[n] for row in rows if n < len(row)) for n in range(width)]
            kinds[kind] = counts
            mean = sum((n + 1) * count for n, count in enumerate(counts)) / max(1, sum(counts))
            self._tell(f"commit_len of {kind}: {mean:.2f}")
        return kinds

    def _prompt_length(self, prompts: Lengths, number: int) -> int:
        drawn = prompts.draw(Even(self._seed, number))
        return max(self._source.shortest, min(drawn, self._source.longest))

    def _fits(self, context: int, batch: int, pool: int) -> bool:
        fits = _needed(context, batch) < pool
        if not fits:
            self._tell(f"step of {batch} at {context} tokens: left out, the pool has {pool}")
        return fits

    def _prefill(self, context: int) -> float:
        """Median seconds of a prompt's prefill, nothing of it cached."""
        found: list[float] = []
        for _ in range(_REPEATS):
            before = self._load()["total_prefill_busy_us"]
            self._ask("prose", context, 1)
            found.append((self._load()["total_prefill_busy_us"] - before) / 1e6)
        seconds = statistics.median(found)
        self._tell(f"prefill of {context} tokens: {seconds * 1e3:.1f} ms")
        return round(seconds, 6)

    def _step(self, context: int, batch: int) -> float:
        """Median seconds of a step of ``batch`` streams, while all of them decode.

        Their prompts are cached before: none ends while another's is still prefilled.
        """
        texts = [self._source.text("prose", context, self._random) for _ in range(batch)]
        for text in texts:
            self._send("prose", text, 1)
        seconds = statistics.median(self._together(texts, context) for _ in range(_REPEATS))
        self._tell(f"step of {batch} at {context} tokens: {seconds * 1e3:.2f} ms")
        return round(seconds, 6)

    def _together(self, texts: Sequence[str], context: int) -> float:
        """Mean seconds of a step while answers to all ``texts`` decode."""
        answers: list[_Answer] = []
        failures: list[Exception] = []

        def one(text: str) -> None:
            try:
                answers.append(self._send("prose", text, _ANSWER))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        begin = max(answer.times[0] for answer in answers)
        end = min(answer.times[-1] for answer in answers)
        counts = [sum(begin <= at <= end for at in answer.times) - 1 for answer in answers]
        steps = statistics.fmean(counts)
        if steps < _FEWEST_STEPS:
            raise PlanError(
                f"--batches: {len(texts)} answers after {context} tokens did not decode together: "
                f"does {self._url} run so many at once?"
            )
        return (end - begin) / steps

    def _ask(self, kind: str, context: int, tokens: int) -> _Answer:
        return self._send(kind, self._source.text(kind, context, self._random), tokens)

    def _send(self, kind: str, text: str, tokens: int) -> _Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_spec_tokens_details": True,
            "metadata": {"text": kind},
        }
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        try:
            payload, headers = json.dumps(body).encode(), {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", payload, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise PlanError(f"{self._url} answered {answer.status}: {answer.read()[:300]!r}")
            times, last = [], b""
            for line in answer:
                if line.startswith(b"data: {"):
                    last = line
                    if b'"content":"' in line and b'"content":""' not in line:
                        times.append(time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            raise PlanError(f"{self._url} broke off: {error or type(error).__name__}") from None
        finally:
            connection.close()
        details = json.loads(last[6:]).get("usage", {}).get("spec_tokens_details") or {}
        if not times:
            raise PlanError(f"{self._url} answered without text: {last[:300]!r}")
        return _Answer(times, details.get("spec_correct_drafts_histogram") or [0])

    def _info(self) -> dict[str, Any]:
        info = self._get("/server_info")
        if not isinstance(info, dict):
            raise PlanError(f"{self._url}/server_info tells nothing: --url must be an engine's")
        return info

    def _load(self) -> dict[str, Any]:
        try:
            load: dict[str, Any] = self._get("/v1/loads")["loads"][0]
            load["max_total_num_tokens"], load["total_prefill_busy_us"]
        except (LookupError, TypeError):
            raise PlanError(
                f"{self._url}/v1/loads tells no prefill time: --url must be an engine's, "
                "not a gateway's"
            ) from None
        return load

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self._url + path, timeout=_SECONDS) as answer:
                return json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PlanError(
                f"{self._url}{path}: {error}: --url must be an engine's, not a gateway's"
            ) from None


def _needed(context: int, batch: int) -> int:
    """Tokens of the pool."""
    return batch * (context + _ANSWER + _AROUND)


def _check(contexts: Sequence[int], batches: Sequence[int], pool: int, running: object) -> None:
    """Every context and every batch must be recorded at least once."""
    if isinstance(running, int) and batches[-1] > running:
        raise PlanError(
            f"--batches: the engine runs at most {running} requests at once, got {batches[-1]}"
        )
    for field, context, batch in (
        ("--contexts", contexts[-1], batches[0]),
        ("--batches", contexts[0], batches[-1]),
    ):
        if _needed(context, batch) >= pool:
            raise PlanError(
                f"{field}: {batch} x {context} tokens and answers of {_ANSWER} do not fit the "
                f"engine's pool of {pool}"
            )
