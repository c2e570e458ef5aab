"""An engine whose steps take as long as a curve says: one coroutine, no thread."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from longleaf.embedded.engine import EngineDeadError, EngineHealth, GenerationStream
from longleaf.embedded.loads import LoadSnapshot
from longleaf.embedded.request import EventSink, GenerationRequest, StepEvent
from longleaf.embedded.scheduler import Scheduler
from longleaf.simulate.executor import SimulatedExecutor

_SHORTEST_SLEEP = 0.002
_MOST_LAG = 0.1
"""Seconds that the simulation may be late and still catch up; what is more is lost, and told."""

logger = logging.getLogger(__name__)


class SimulatedEngine:
    """Runs a scheduler on the event loop, which it never holds: between steps it sleeps.

    Commands are taken up between steps and events come when their part of the step is over, as with
    an engine that computes. ``lost_seconds``: what this machine was too slow for; while it grows,
    times are longer than the curve's. ``publish`` is called with every snapshot.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        publish: Callable[[LoadSnapshot], None] = lambda _: None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._publish = publish
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._held: deque[tuple[float, EventSink, StepEvent]] = deque()
        self._dead = ""
        self.lost_seconds = 0.0
        self._snapshot = scheduler.snapshot()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def snapshot(self) -> LoadSnapshot:
        """The scheduler's figures after its last step."""
        return self._snapshot

    @property
    def health(self) -> EngineHealth:
        """Whether the coroutine runs."""
        return EngineHealth(not self._task.done(), 0.0, self._dead)

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queue ``request``; its events, the last one with ``finish``, go to ``sink``.
        ``EngineDeadError`` if dead.
        """
        if self._task.done():
            raise EngineDeadError(self._dead or "the engine is closed")
        self._post(lambda: self._scheduler.add(request, lambda event: self._hold(sink, event)))

    def cancel(self, request: GenerationRequest) -> None:
        """End ``request`` before the next step, if it has not ended."""
        self._post(lambda: self._scheduler.cancel(request))

    def abort(self, prefix: str) -> None:
        """End every request whose id begins with ``prefix`` before the next step."""
        self._post(lambda: self._scheduler.abort(prefix))

    def stream(self, request: GenerationRequest) -> GenerationStream:
        """Submit ``request`` and iterate its events; closing the stream aborts it."""
        return GenerationStream(self, request)

    async def close(self) -> None:
        """Stop; requests still there end with an error."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _hold(self, sink: EventSink, event: StepEvent) -> None:
        self._held.append((self._executor.elapsed, sink, event))

    async def _run(self) -> None:
        cause = "the engine is closed"
        try:
            await self._serve()
        except Exception as error:
            logger.critical("the simulated engine died", exc_info=error)
            cause = f"the engine died: {type(error).__name__}: {error}"
        finally:
            self._dead = cause
            self._scheduler.abandon(cause)
            for _, sink, event in self._held:
                sink(event)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while True:
            if self._scheduler.idle and not self._inbox:
                self._wake.clear()
                await self._wake.wait()
                now = loop.time()
            self._executor.elapsed = 0.0
            while self._inbox:
                self._inbox.popleft()()
            if not self._scheduler.idle:
                self._scheduler.step()
            while self._held:
                at, sink, event = self._held[0]
                await _sleep_until(now + at)
                self._held.popleft()
                sink(event)
            now += self._executor.elapsed
            await _sleep_until(now)
            self._snapshot = self._scheduler.snapshot()
            self._publish(self._snapshot)
            lag = loop.time() - now - _MOST_LAG
            if lag > 0:
                self.lost_seconds += lag
                now += lag


async def _sleep_until(deadline: float) -> None:
    left = deadline - asyncio.get_running_loop().time()
    await asyncio.sleep(left if left > _SHORTEST_SLEEP else 0)
