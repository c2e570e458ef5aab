"""Continuous batching: admit, prefill in chunks, decode, retract when the pool is short, abort
between steps.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from longleaf.embedded.executor import BatchExecutor, Failure
from longleaf.embedded.loads import LoadCounters, LoadSnapshot
from longleaf.embedded.memory import KvLease, KvMemory
from longleaf.embedded.options import SchedulerOptions
from longleaf.embedded.prefill import Chunk
from longleaf.embedded.request import (
    EventSink,
    Finish,
    FinishKind,
    GenerationRequest,
    RequestState,
    StepEvent,
    refusal,
)
from longleaf.embedded.sampling import TokenLogprob
from longleaf.embedded.slots import SlotError
from longleaf.embedded.text import TextAssembler
from longleaf.embedded.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns all requests and the pool's memory; one thread calls it.

    First come, first served. A request is admitted when the pool has room for its prompt and
    ``decode_headroom`` for every running answer; decode rows are taken step by step. When they run
    short the newest request is retracted: its rows go to the prefix cache, it waits at the head of
    the queue and is computed again, with the same tokens. The oldest one always moves on and no
    request is accepted that could not run alone, so nothing can deadlock.
    """

    def __init__(
        self,
        executor: BatchExecutor,
        memory: KvMemory,
        counters: LoadCounters,
        tokenizer: Tokenizer,
        vocab_size: int,
        options: SchedulerOptions,
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._options = options
        self.memory = memory
        self._counters = counters
        self._executor = executor
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []

    @property
    def idle(self) -> bool:
        """Whether no request is there."""
        return not self._waiting and not self._running

    def add(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue a request; every outcome, refusals too, comes as an event."""
        problem = self._problem(request)
        if problem:
            sink(refusal(request, problem, 400))
            return
        room = self._options.max_request_len - len(request.prompt) - 1
        wanted = room if request.max_tokens is None else min(request.max_tokens, room)
        text = TextAssembler(
            self._tokenizer, request.stop, request.skip_special_tokens, request.keep_stop
        )
        tokens = request.prompt.astype(np.int64)
        state = RequestState(request, sink, text, wanted, tokens, len(tokens))
        self._waiting.append(state)
        self._admit()
        limit = self._options.max_queued_requests
        if limit is not None and len(self._waiting) > limit and state.lease is None:
            self._waiting.remove(state)
            sink(refusal(request, "The request queue is full.", 503))

    def _problem(self, request: GenerationRequest) -> str:
        length, limit = len(request.prompt), self._options.max_input_len
        if length == 0:
            return "The prompt is empty."
        if length >= limit:
            return (
                f"Input length ({length} tokens) exceeds the maximum allowed length "
                f"({limit} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
        if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= self._vocab_size:
            return f"The prompt has token ids outside 0..{self._vocab_size - 1}."
        if any(state.rid == request.rid for state in self._states()):
            return f"A request with the id {request.rid!r} is still running."
        return ""

    def abort(self, prefix: str) -> None:
        """End every request whose id begins with ``prefix``; each gets its last event now."""
        self._abort([state for state in self._states() if state.rid.startswith(prefix)])

    def cancel(self, request: GenerationRequest) -> None:
        """End this very request, if it is still there."""
        self._abort([state for state in self._states() if state.request is request])

    def _abort(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self._emit(state, (), (), Finish(FinishKind.ABORT))

    def abandon(self, message: str) -> None:
        """Tell every request that it ends with an error. For the end of the engine: nothing is
        given back.
        """
        states = list(self._states())
        self._running.clear()
        self._waiting.clear()
        for state in states:
            state.sink(refusal(state.request, message, 503))

    def step(self) -> None:
        """Admit what fits, compute one prefill chunk, then one decode step of all
        running answers.
        """
        self._admit()
        if not (self._prefill() and self._options.prefill_first):
            self._decode_all()

    def snapshot(self) -> LoadSnapshot:
        """Load figures as of now."""
        counters, slots = self._counters, self.memory.slots
        uncached = sum(state.length for state in self._waiting)
        used = self.memory.used
        return LoadSnapshot(
            timestamp=time.time(),
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_waiting_uncached_tokens=uncached,
            num_used_tokens=used,
            num_cached_tokens=self.memory.cache.num_evictable,
            num_free_tokens=slots.num_free,
            num_total_tokens=used + uncached,
            max_total_num_tokens=slots.capacity,
            max_running_requests=self._options.max_running_requests,
            gen_throughput=counters.throughput,
            cache_hit_rate=counters.cache_hit_rate,
            total_prefill_uncached_tokens=counters.prefill_tokens,
            total_prefill_busy_us=int(counters.prefill_seconds * 1e6),
            decode_moments=tuple(counters.moments) if counters.moments[0] else None,
            accept_length=counters.accept_length,
            accept_rate=counters.accept_rate,
            spec_verify_calls=counters.spec_calls,
            num_retracted_reqs=sum(state.retractions > 0 for state in self._waiting),
        )

    def _states(self) -> Iterator[RequestState]:
        yield from self._running
        yield from self._waiting

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._options.max_running_requests:
            state = self._waiting[0]
            end = state.prefill_end
            # The prompt's last token is computed even if cached: the first token comes from it.
            reuse = end if state.completion_len else end - 1
            lease = KvLease(self.memory, state.tokens[:end], reuse, state.namespace)
            wanted = self._room_to_admit(state, end - lease.length)
            if self.memory.available < wanted:
                lease.close()
                if not self._running:
                    raise SlotError(
                        f"request {state.rid} of {state.length} tokens needs {wanted} slots of "
                        f"an unused pool that has {self.memory.available}"
                    )
                return
            self._waiting.popleft()
            state.lease = lease
            self._counters.add_admission(end, lease.length)
            if state.retractions == 0:
                state.cached_tokens = lease.length
            self._running.append(state)

    def _room_to_admit(self, state: RequestState, uncached: int) -> int:
        if not self._running:
            return uncached + 1
        room = 0
        for other in (*self._running, state):
            room += min(other.remaining, self._options.decode_headroom)
            room += self._executor.rows_needed(other)
        missing = sum(other.prefill_end - other.kv.length for other in self._prefilling())
        return room + missing + uncached

    def _prefilling(self) -> list[RequestState]:
        return [state for state in self._running if state.kv.length < state.prefill_end]

    def _prefill(self) -> bool:
        """Compute one chunk; whether there was one."""
        left = self._options.chunked_prefill_size
        chunks: list[Chunk] = []
        for state in self._prefilling():
            if state.lease is None or left == 0:
                continue
            size = min(left, state.prefill_end - state.kv.length)
            if self._make_room(state, size):
                chunks.append(Chunk(state, self.memory.allocate(size)))
                left -= size
        if not chunks:
            return False
        results, failures = self._executor.prefill(chunks)
        for result in results:
            state = result.state
            if state.kv.length >= state.prefill_end:
                state.kv.publish(state.tokens[: state.kv.length])
            if result.tokens:
                self._emit(state, result.tokens, result.logprobs, result.finish)
        self._fail(failures)
        return True

    def _make_room(self, state: RequestState, count: int) -> bool:
        """Retract requests newer than ``state``, then itself if it is not alone, until ``count``
        slots are there.
        """
        while self.memory.available < count:
            newest = self._running[-1]
            if newest is state and len(self._running) == 1:
                break
            self._retract(newest)
            if newest is state:
                return False
        return True

    def _decode_all(self) -> None:
        batch = [state for state in self._running if state.kv.length >= state.prefill_end]
        while batch and self.memory.available < len(batch):
            self._retract(self._running[-1])
            batch = [state for state in batch if state.lease is not None]
        if not batch:
            return
        results, failures = self._executor.step(batch)
        for result in results:
            self._emit(result.state, result.tokens, result.logprobs, result.finish)
        self._fail(failures)

    def _emit(
        self,
        state: RequestState,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish: Finish | None,
    ) -> None:
        text = state.text.take()
        if finish is not None:
            text += state.text.close()
            self._leave(state, publish=finish.kind is not FinishKind.ERROR)
        state.sink(StepEvent(state.rid, tokens, text, logprobs, state.usage(), finish))

    def _fail(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            error = failure.error
            logger.error("request %s failed", failure.state.rid, exc_info=error)
            message = f"The request failed inside the engine: {type(error).__name__}: {error}"
            self._emit(failure.state, (), (), Finish(FinishKind.ERROR, message=message))

    def _leave(self, state: RequestState, publish: bool) -> None:
        """Take a request out and give back all that it holds; its computed rows stay cached if
        ``publish``.
        """
        if state.lease is None:
            self._waiting.remove(state)
            return
        self._running.remove(state)
        lease, state.lease = state.lease, None
        if publish:
            lease.publish(state.tokens[: lease.length])
        lease.close()

    def _retract(self, state: RequestState) -> None:
        self._leave(state, publish=True)
        state.retractions += 1
        self._waiting.appendleft(state)
