"""Runs the server: uvicorn, and a drain on SIGTERM or SIGINT that lets running answers end."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from prometheus_client import CollectorRegistry

from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import EngineOptions
from longleaf.embedded.server.app import build_app
from longleaf.embedded.server.service import ServerOptions, Service
from longleaf.metrics import EngineMetrics, SglangMetrics

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5


class DrainingServer(uvicorn.Server):
    """On the first signal: healthy no more, no new work, running answers end, then exit 0.

    The listener stays open until then, so that health checks see a 503 and not a refused
    connection. Answers that take longer than the drain may are aborted. A second signal ends the
    server at once.
    """

    def __init__(self, config: uvicorn.Config, services: Sequence[Service]) -> None:
        super().__init__(config)
        self._services = services
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn before it listens."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM."""
        if self._services[0].draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        for service in self._services:
            service.draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        seconds = self._services[0].server.drain_seconds
        logger.info("draining: running answers have %.0f s", seconds)
        await self._wait_for_answers(seconds)
        for service in self._services:
            service.engine.abort("")
        await self._wait_for_answers(_CLOSE_SECONDS)
        self.should_exit = True

    async def _wait_for_answers(self, seconds: float) -> None:
        running = set(self.server_state.tasks)
        if running:
            await asyncio.wait(running, timeout=seconds)


def serve_engine(
    loaded: LoadedModels, options: EngineOptions, server: ServerOptions, log_level: str
) -> None:
    """Start the engine and serve it until a signal comes; closes the engine."""
    logging.basicConfig(level=log_level.upper())
    registry = CollectorRegistry()
    with loaded.start(options, EngineMetrics(registry)) as engine:
        SglangMetrics(registry, loaded.info.name, lambda: engine.snapshot.engine_load())
        service = Service(engine, loaded, options, server, registry)
        service.trees = lambda: engine.trees
        config = uvicorn.Config(
            build_app(service),
            host=server.host,
            port=server.port,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        DrainingServer(config, [service]).run()
