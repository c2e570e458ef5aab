"""What the routes share: the engine, the model's facts, the limits, and whether the server is going
down.
"""

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from longleaf.embedded.engine import Engine
from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import EngineOptions
from longleaf.embedded.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, and its limits.

    ``drain_seconds``: how long running answers may take to end after a signal. ``stall_seconds``:
    a step that takes longer counts as hung (SGLang's health check waits as long).
    """

    host: str
    port: int
    max_body_bytes: int
    drain_seconds: float
    stall_seconds: float = 20.0


@dataclass(slots=True)
class Service:
    """One running server. Only ``draining`` changes."""

    engine: Engine
    loaded: LoadedModels
    options: EngineOptions
    server: ServerOptions
    registry: CollectorRegistry
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def healthy(self) -> bool:
        """Whether new requests should come here."""
        health = self.engine.health
        return (
            health.alive
            and health.stalled_seconds < self.server.stall_seconds
            and not self.draining
        )

    def check_open(self) -> None:
        """Refuse new work while going down."""
        if self.draining:
            raise ApiError("The server is shutting down.", 503)
