"""One replica as the gateway sees it: client, health, limits and what runs on it."""

import asyncio
import json
import logging
from dataclasses import replace
from typing import Literal, Protocol

from longleaf.gateway.replicas.breaker import CircuitBreaker
from longleaf.gateway.replicas.budget import ReplicaBudget
from longleaf.gateway.replicas.client import ReplicaClient, ReplicaError
from longleaf.gateway.replicas.facts import ReplicaFacts, parse_facts
from longleaf.gateway.replicas.loads import (
    LoadReport,
    StepTotals,
    parse_loads,
    parse_step_totals,
    restarted,
)
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0
_MAX_CONNECTIONS = 1024

ReplicaState = Literal["starting", "ready", "unhealthy", "circuit_open", "draining"]


class Waiter(Protocol):
    """A request that waits for its first event."""

    def give_up(self, error: ReplicaError) -> None:
        """Stop waiting."""
        ...


class Replica:
    """A replica. ``ready`` is set by the health check and read by routing.

    Invariants: ``waiting <= in_flight``; both return to 0 when no request runs.
    """

    def __init__(
        self,
        url: str,
        client: ReplicaClient,
        metrics: GatewayMetrics,
        unhealthy_after: int,
        healthy_after: int,
        budget: ReplicaBudget,
        breaker: CircuitBreaker | None = None,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        self.url = url
        self.breaker = breaker or CircuitBreaker()
        self.draining = False
        """Whether it is on its way out: what runs may end, nothing new comes."""
        self.announced = True
        """Whether it is called ready where it was found; no matter once it is ready here."""
        self.cache_age = 0
        """Changes whenever its prefix cache may have been lost."""
        self.alive_at = asyncio.get_running_loop().time()
        """Loop time of its latest sign of life."""
        self._max_connections = max_connections
        self._pending: set[Waiter] = set()
        self.budget = budget
        self.client = client
        self.facts: ReplicaFacts | None = None
        self.in_flight = 0
        self._metrics = metrics
        self._unhealthy_after = unhealthy_after
        self._healthy_after = healthy_after
        self._ready = False
        self._was_ready = False
        self._streak = 0
        """Successes (> 0) or failures (< 0) in a row."""
        self._aborts: set[asyncio.Task[None]] = set()
        metrics.replica_ready.labels(url).set(0)

    @property
    def waiting(self) -> int:
        """Requests in flight that have had no event yet."""
        return len(self._pending)

    @property
    def ready(self) -> bool:
        """Whether new requests may go here, now or when there is room."""
        return self._ready and not self.draining and self.breaker.allows

    @property
    def has_connection(self) -> bool:
        """Whether one more request may go out to it; one that was placed is as good as out."""
        return max(self.in_flight, self.budget.held) < self._max_connections

    @property
    def state(self) -> ReplicaState:
        """In one word."""
        if self.draining:
            return "draining"
        if not self._ready:
            return "unhealthy" if self._was_ready else "starting"
        return "ready" if self.breaker.state == "closed" else "circuit_open"

    def enter(self, request: Waiter) -> None:
        """``request`` goes to this replica; ``leave`` must follow."""
        self.in_flight += 1
        self._pending.add(request)
        self.breaker.begin(request)

    def begun(self, request: Waiter) -> None:
        """``request`` has its first event."""
        self._pending.discard(request)

    def leave(self, request: Waiter) -> None:
        """``request`` is over."""
        self.in_flight -= 1
        self._pending.discard(request)
        self.breaker.end(request)

    def note_success(self) -> None:
        """A health check passed and the facts are known."""
        self.alive_at = asyncio.get_running_loop().time()
        self._streak = max(self._streak, 0) + 1
        if self._ready or not self.announced:
            return
        if not self._was_ready or self._streak >= self._healthy_after:
            self._set_ready(True, "passes its health checks")

    def note_alive(self) -> None:
        """The replica answered a request: failures before that are no longer in a row."""
        self.alive_at = asyncio.get_running_loop().time()
        self.breaker.succeeded()
        self._streak = max(self._streak, 0)

    def note_failed_request(self, why: str) -> None:
        """A request failed by the replica's fault."""
        self.breaker.failed()
        self.note_failure(why)

    def end_waiting(self, limit: float) -> None:
        """Let go of requests that wait for a replica that has given no sign of life for ``limit``
        seconds: hung, not busy.
        """
        silent = asyncio.get_running_loop().time() - self.alive_at
        if silent > limit and self._pending:
            message = f"{self.url} has given no sign of life for {silent:.3g} s"
            for request in tuple(self._pending):
                request.give_up(ReplicaError("hung", message))

    def note_failure(self, why: str) -> None:
        """A health check, or a connection, failed."""
        self._streak = min(self._streak, 0) - 1
        if self._ready and -self._streak >= self._unhealthy_after:
            self._set_ready(False, why)

    def _set_ready(self, ready: bool, why: str) -> None:
        self._ready = ready
        if not ready:
            self.cache_age += 1
        self._was_ready = self._was_ready or ready
        self._metrics.replica_ready.labels(self.url).set(int(ready))
        level = logging.INFO if ready else logging.WARNING
        state = "ready" if ready else "not ready"
        fields = {"replica": self.url, "ready": ready, "why": why}
        logger.log(level, "replica %s", state, extra={"fields": fields})

    async def learn_facts(self, limit: float) -> None:
        """Read models and limits again; ``ReplicaError`` where the replica does not tell."""
        models = await self.client.fetch_json("GET", "/v1/models", limit)
        server_info = await self.client.fetch_json("GET", "/server_info", limit)
        try:
            facts = parse_facts(models, server_info)
        except ValueError as error:
            raise ReplicaError("bad_answer", f"{self.url}: {error}") from error
        if facts.limits != (self.facts.limits if self.facts else None):
            logger.info(
                "replica limits",
                extra={
                    "fields": {
                        "replica": self.url,
                        "models": sorted(facts.model_names),
                        "context_length": facts.limits.context_length,
                        "max_req_input_len": facts.limits.max_req_input_len,
                        "max_total_num_tokens": facts.limits.max_total_num_tokens,
                    }
                },
            )
        if self.facts is not None and facts.model_names != self.facts.model_names:
            self.cache_age += 1  # another engine
        self.facts = facts
        self.budget.set_limits(facts.limits)

    async def learn_load(self, limit: float) -> None:
        """Read the load; ``ReplicaError`` where the replica does not tell.

        A replica that restarted is asked for its limits too: its KV pool may have shrunk.
        """
        held = self.budget.snapshot()
        answer = await self.client.fetch_json("GET", "/v1/loads", limit)
        try:
            report = parse_loads(answer)
        except ValueError as error:
            raise ReplicaError("bad_answer", f"{self.url}: {error}") from error
        if report.decode is None and report.running:
            report = replace(report, step_totals=await self._step_totals(limit))
        last = self.budget.latest
        if last is not None and restarted(last, report):
            self.cache_age += 1
            await self.learn_facts(limit)
        if last is not None and _worked(last, report):
            self.alive_at = asyncio.get_running_loop().time()
        self.budget.report(report, held)

    async def _step_totals(self, limit: float) -> StepTotals | None:
        status, text = await self.client.fetch("GET", "/metrics", limit)
        return parse_step_totals(text.decode("utf-8", "replace")) if status == 200 else None

    def count_error(self, kind: str) -> None:
        """Count a failed exchange."""
        self._metrics.upstream_errors.labels(self.url, kind).inc()

    def abort(self, rid: str, started: bool) -> None:
        """Tell the engine to stop request ``rid``, in the background.

        The engine matches ids by prefix: ``rid`` must be a whole id of our own making.
        """
        when = "after_first_event" if started else "before_first_event"
        self._metrics.aborts.labels(when).inc()
        task = asyncio.get_running_loop().create_task(self._send_abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, rid: str) -> None:
        body = json.dumps({"rid": rid}).encode()
        try:
            await self.client.fetch("POST", "/abort_request", _ABORT_SECONDS, body)
        except ReplicaError as failure:
            fields = {"replica": self.url, "rid": rid, "why": str(failure)}
            logger.warning("abort not delivered", extra={"fields": fields})

    async def close(self) -> None:
        """Deliver the aborts that are under way, then close the connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_SECONDS)
        await self.client.close()


def _worked(earlier: LoadReport, later: LoadReport) -> bool:
    """Whether the engine computed anything between two reports."""
    return later.prefilled_tokens > earlier.prefilled_tokens or later.decode != earlier.decode
