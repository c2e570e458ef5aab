"""Who counts a prompt's tokens: the gateway's own tokenizer, or a replica's ``/tokenize``."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from longleaf.gateway.prompts.inspection import Inspection, Route, WrongBodyError, inspect, parse
from longleaf.gateway.prompts.pool import PoolFullError, WorkerError, WorkerPool
from longleaf.gateway.prompts.tokenizer import Count
from longleaf.gateway.replicas.client import ReplicaError
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_INLINE_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop: it takes a millisecond."""

_ANSWER_BYTES = 2**20
_TOKEN_BYTES = 8
"""Of a token in an answer of ``/tokenize``, which lists them; there are fewer than bytes."""

_PROBE = [
    {"role": "system", "content": "Answer in one word.\n\n"},
    {"role": "user", "content": "  naïve 東京 🙂 x = [1234567, 3.14];\tdone?! "},
]
"""A chat on which different tokenizers and templates disagree."""


@dataclass(slots=True)
class Prompt:
    """A valid body: its JSON text, what it says, and its tokens if they were counted."""

    text: bytes
    route: Route
    inspection: Inspection
    count: Count | None = None


class PromptReader:
    """Reads bodies and counts their prompts. ``check`` runs beside it; ``close`` at the end, which
    closes ``pool`` too. ``timeout``: of a replica's count, in seconds.

    A tokenizer that does not load, or counts otherwise than a replica that serves its model, is an
    error in the log and ``tokenizer_up`` 0; prompts are then counted by the replicas.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, str],
        pool: WorkerPool,
        timeout: float,
        registry: ReplicaRegistry,
        metrics: GatewayMetrics,
    ) -> None:
        self._tokenizers = tokenizers
        self._timeout = timeout
        self._pool = pool
        self._registry = registry
        self._metrics = metrics
        self._broken: set[str] = set()
        self._wrong: set[str] = set()
        self._bounded = metrics.token_counts.labels("bounded")

    async def check(self, interval: float) -> None:
        """Try every configured tokenizer, then hold it against each replica that comes, for ever.

        A replica is asked once for each of its models, as soon as it is ready (looked at every
        ``interval`` seconds), and again when its models or limits changed.
        """
        for path in dict.fromkeys(self._tokenizers.values()):
            try:
                answer = await self._pool.run({"kind": "load", "path": path})
                self._note_tokenizer(path, answer.get("tokenizer_error"))
            except (WorkerError, PoolFullError) as error:
                self._note_tokenizer(path, str(error))
        held: WeakKeyDictionary[Replica, tuple[object, object]] = WeakKeyDictionary()
        while self._tokenizers:
            for replica in self._registry.ready():
                facts = replica.facts
                if facts is None:
                    continue
                told = (facts.model_names, facts.limits)
                if held.get(replica) != told:
                    held[replica] = told
                    for model in facts.model_names:
                        await self._compare(replica, model)
            await asyncio.sleep(interval)

    async def _compare(self, replica: Replica, model: str) -> None:
        """Count one chat here and there."""
        path = self._path(model)
        if path is None:
            return
        text = json.dumps({"model": model, "messages": _PROBE}).encode()
        try:
            ours = (await self._ask(text, "chat_completions")).count
            if ours is None:
                return
            theirs = _counted(await replica.client.fetch_json("POST", "/tokenize", 30.0, text))
        except (WorkerError, PoolFullError, ReplicaError, ValueError) as error:
            fields = {"replica": replica.url, "tokenizer": path, "why": str(error)}
            logger.warning("tokenizer not compared", extra={"fields": fields})
            return
        if ours != theirs:
            self._wrong.add(model)
            self._metrics.tokenizer_up.labels(path).set(0)
            numbers: dict[str, object] = {
                "model": model,
                "replica": replica.url,
                "tokenizer": path,
                "counted": ours.longest,
                "replica_counted": theirs.longest,
            }
            logger.error("tokenizer is not the replica's", extra={"fields": numbers})

    def _path(self, model: str) -> str | None:
        """The tokenizer for ``model``, unless it was found wrong."""
        if model in self._wrong:
            return None
        return self._tokenizers.get(model, self._tokenizers.get(""))

    async def close(self) -> None:
        """End the workers."""
        await self._pool.close()

    async def read(self, text: bytes, route: Route) -> Prompt:
        """Parse and check a body; a long one in a worker, which counts it too where it can.

        Raises ``WrongBodyError``, ``WorkerError`` where a worker failed, ``PoolFullError``.
        """
        if len(text) > _INLINE_BYTES:
            return await self._ask(text, route)
        fields = parse(text, route)
        return Prompt(text, route, inspect(fields, len(text), route))

    async def count(self, prompt: Prompt, replicas: Sequence[Replica]) -> Count | None:
        """Tokens of ``prompt``, exactly; ``None`` where nobody could count them.

        ``replicas`` serve its model. Raises ``PoolFullError``.
        """
        if prompt.count is not None:
            return prompt.count
        inspection = prompt.inspection
        if inspection.given_tokens is not None and inspection.all_given_tokens is not None:
            self._metrics.token_counts.labels("given").inc()
            return Count(inspection.given_tokens, inspection.all_given_tokens)
        path = self._path(inspection.model)
        # A long body has been to a worker already: it had no count for us.
        if path is not None and inspection.plain and len(prompt.text) <= _INLINE_BYTES:
            try:
                count = (await self._ask(prompt.text, prompt.route)).count
            except WorkerError as error:
                logger.error("tokenizer worker failed", extra={"fields": {"why": str(error)}})
                count = None
            if count is not None:
                return count
        count = await self._ask_replicas(prompt.text, replicas)
        self._metrics.token_counts.labels("failed" if count is None else "counted").inc()
        return count

    def bounded(self) -> None:
        """Note that a prompt needed no count."""
        self._bounded.inc()

    async def _ask(self, text: bytes, route: Route) -> Prompt:
        header = {
            "kind": "prompt",
            "route": route,
            "tokenizers": {**self._tokenizers, **dict.fromkeys(self._wrong)},
            "most": self._most(),
        }
        answer = await self._pool.run(header, text)
        if "wrong" in answer:
            raise WrongBodyError(answer["wrong"], answer["param"])
        inspection = _inspection(answer["inspection"])
        path = self._path(inspection.model)
        if path is not None and ("count" in answer or "tokenizer_error" in answer):
            self._note_tokenizer(path, answer.get("tokenizer_error"))
        if "count" not in answer or path is None:
            return Prompt(text, route, inspection)
        self._metrics.token_counts.labels("local").inc()
        self._metrics.tokenizer_seconds.labels("local").observe(answer["seconds"])
        return Prompt(text, route, inspection, Count(**answer["count"]))

    def _most(self) -> int | None:
        """The longest prompt that any replica takes: what must be longer needs no count."""
        limits = [
            replica.facts.limits.prompt_limit
            for replica in self._registry.replicas
            if replica.facts is not None
        ]
        known = [limit for limit in limits if limit is not None]
        return max(known) if known and len(known) == len(limits) else None

    def _note_tokenizer(self, path: str, error: str | None) -> None:
        self._metrics.tokenizer_up.labels(path).set(int(error is None))
        if error is None:
            self._broken.discard(path)
        elif path not in self._broken:
            self._broken.add(path)
            fields = {"tokenizer": path, "why": error}
            logger.error("tokenizer does not load", extra={"fields": fields})

    async def _ask_replicas(self, text: bytes, replicas: Sequence[Replica]) -> Count | None:
        # The whole request: every field that shapes the prompt counts, known to us or not.
        ready_first = sorted(replicas, key=lambda replica: (not replica.ready, replica.in_flight))
        for replica in ready_first[:2]:
            begin = time.perf_counter()
            try:
                most = _ANSWER_BYTES + _TOKEN_BYTES * len(text)
                answer = await replica.client.fetch_json(
                    "POST", "/tokenize", self._timeout, text, most
                )
                count = _counted(answer)
            except (ReplicaError, ValueError) as error:
                replica.count_error("tokenize")
                fields = {"replica": replica.url, "why": str(error)}
                logger.warning("prompt tokens not counted", extra={"fields": fields})
            else:
                seconds = time.perf_counter() - begin
                self._metrics.tokenizer_seconds.labels("replica").observe(seconds)
                return count
        return None


def _inspection(answer: Mapping[str, Any]) -> Inspection:
    return Inspection(**{**answer, "names": tuple(answer["names"])})


def _counted(answer: object) -> Count:
    count = answer.get("count") if isinstance(answer, dict) else None
    given = count if isinstance(count, list) else [count]
    counts = [
        one for one in given if isinstance(one, int) and not isinstance(one, bool) and one >= 0
    ]
    if not counts or len(counts) < len(given):
        raise ValueError("/tokenize answered without a count")
    return Count(max(counts), sum(counts))
