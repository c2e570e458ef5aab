"""The engine: a thread that runs the scheduler, and the asyncio side that feeds it and listens."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from longleaf.embedded.loads import LoadSnapshot
from longleaf.embedded.recorder import Recorder, VerifiedTree
from longleaf.embedded.request import (
    EventSink,
    GenerationRequest,
    StepEvent,
    join,
    refusal,
)
from longleaf.embedded.scheduler import Scheduler

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25


class _Commands(Protocol):
    """What the inbox asks for."""

    def add(self, request: GenerationRequest, sink: EventSink) -> None: ...

    def cancel(self, request: GenerationRequest) -> None: ...

    def abort(self, prefix: str) -> None: ...


class _Ended:
    """Answers commands that come when no scheduler runs any more."""

    def __init__(self, cause: str) -> None:
        self._cause = cause

    def add(self, request: GenerationRequest, sink: EventSink) -> None:
        sink(refusal(request, self._cause, 503))

    def cancel(self, request: GenerationRequest) -> None:
        pass

    def abort(self, prefix: str) -> None:
        pass


_Command = Callable[[_Commands], None]


class RunsRequests(Protocol):
    """What a stream of events needs of an engine."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue ``request``; its events, the last one with ``finish``, go to ``sink``."""

    def cancel(self, request: GenerationRequest) -> None:
        """End ``request``, if it has not ended."""


class EngineDeadError(RuntimeError):
    """The engine's thread has ended: no request can be served any more."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """``alive``: the thread runs. ``stalled_seconds``: time since it last finished a step or looked
    for work.
    """

    alive: bool
    stalled_seconds: float
    cause: str = ""


class Engine:
    """Runs a scheduler in a thread of its own, so that no event loop waits for a matrix product.

    ``submit`` and ``abort`` may be called from any thread; sinks are called in the engine's thread
    and must not block. Use as a context manager, or call ``close``.
    """

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._recorder = recorder
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopping = False
        self._dead: str | None = None
        self._beat = time.monotonic()
        self._snapshot = scheduler.snapshot()
        self._thread = threading.Thread(target=self._run, name="longleaf-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def trees(self) -> Sequence[VerifiedTree]:
        """The last draft trees, oldest first; never waits."""
        return self._recorder.trees

    @property
    def snapshot(self) -> LoadSnapshot:
        """The scheduler's figures after its last step; never waits."""
        return self._snapshot

    @property
    def health(self) -> EngineHealth:
        """Whether the thread lives and moves; never waits."""
        return EngineHealth(
            self._dead is None and self._thread.is_alive(),
            time.monotonic() - self._beat,
            self._dead or "",
        )

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue ``request``; its events, the last one with ``finish``, go to ``sink``.
        ``EngineDeadError`` if dead.
        """
        self._post(lambda scheduler: scheduler.add(request, sink))

    def cancel(self, request: GenerationRequest) -> None:
        """End ``request`` before the next step, if it has not ended. Never fails."""
        with contextlib.suppress(EngineDeadError):
            self._post(lambda scheduler: scheduler.cancel(request))

    def abort(self, prefix: str) -> None:
        """End every request whose id begins with ``prefix`` before the next step. Never fails."""
        with contextlib.suppress(EngineDeadError):
            self._post(lambda scheduler: scheduler.abort(prefix))

    def stream(self, request: GenerationRequest) -> "GenerationStream":
        """Submit ``request`` from a coroutine and iterate its events; closing the
        stream aborts it.
        """
        return GenerationStream(self, request)

    def generate(self, request: GenerationRequest, timeout: float | None = None) -> StepEvent:
        """Run ``request`` to its end and return all of it as one event. For threads without an
        event loop.

        ``TimeoutError`` when no event comes for ``timeout`` seconds; the request is then aborted.
        """
        events: queue.SimpleQueue[StepEvent] = queue.SimpleQueue()
        self.submit(request, events.put)
        collected: StepEvent | None = None
        while True:
            try:
                event = events.get(timeout=timeout)
            except queue.Empty as error:
                self.cancel(request)
                raise TimeoutError(f"request {request.rid}: no event for {timeout} s") from error
            collected = event if collected is None else join(collected, event)
            if collected.finish is not None:
                return collected

    def close(self, timeout: float = 30.0) -> None:
        """Stop the thread after its current step; requests still there end with an error."""
        with self._lock:
            self._stopping = True
        self._inbox.put(lambda scheduler: None)
        self._thread.join(timeout)

    def _post(self, command: _Command) -> None:
        with self._lock:
            if self._dead is not None or self._stopping:
                raise EngineDeadError(self._dead or "the engine is closed")
            self._inbox.put(command)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._scheduler.idle:
                    self._scheduler.step()
                self._publish()
            cause = "the engine is closed"
        except BaseException as error:
            logger.critical("the engine's thread died", exc_info=error)
            cause = f"the engine's thread died: {type(error).__name__}: {error}"
        self._end(cause)

    def _take_commands(self) -> None:
        wait = self._scheduler.idle
        try:
            while True:
                command = self._inbox.get(block=wait, timeout=_IDLE_SECONDS if wait else None)
                command(self._scheduler)
                wait = False
        except queue.Empty:
            return

    def _publish(self) -> None:
        snapshot = self._scheduler.snapshot()
        self._recorder.pool(
            snapshot.num_used_tokens, snapshot.num_cached_tokens, snapshot.num_free_tokens
        )
        self._snapshot = snapshot
        self._beat = time.monotonic()

    def _end(self, cause: str) -> None:
        """Nobody waits for ever: what runs and what was still to come ends with an error."""
        with self._lock:
            self._dead = cause
        self._scheduler.abandon(cause)
        ended = _Ended(cause)
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()(ended)


class GenerationStream:
    """The events of one request, for one coroutine. Close it (or use ``async with``) to abort what
    is left.
    """

    def __init__(self, engine: RunsRequests, request: GenerationRequest) -> None:
        self.request = request
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[StepEvent] = asyncio.Queue()
        self._done = False
        engine.submit(request, self._deliver)

    async def __aenter__(self) -> "GenerationStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        return self._iterate()

    async def next_event(self) -> StepEvent:
        """The next event; those that have piled up come as one."""
        event = await self._events.get()
        while not self._events.empty():
            event = join(event, self._events.get_nowait())
        if event.finish is not None:
            self._done = True
        return event

    async def collect(self) -> StepEvent:
        """The whole answer as one event."""
        event = await self.next_event()
        while event.finish is None:
            event = join(event, await self.next_event())
        return event

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._done:
            self._done = True
            self._engine.cancel(self.request)

    async def _iterate(self) -> AsyncIterator[StepEvent]:
        while not self._done:
            yield await self.next_event()

    def _deliver(self, event: StepEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has closed: nobody listens
            if event.finish is None:
                self._engine.cancel(self.request)
