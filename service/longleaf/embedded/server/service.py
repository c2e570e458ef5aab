"""What the routes share: the engine, the model's facts, the limits, and whether the server is going
down.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from longleaf.embedded.engine import Engine
from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import EngineOptions
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.params import SamplingDefaults

STALL_SECONDS = 20.0
"""A step that takes longer than this counts as hung (SGLang's health check waits as long)."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, its body limit in bytes, and how many seconds running answers get
    to end.
    """

    host: str
    port: int
    max_body_bytes: int
    drain_seconds: float


@dataclass(slots=True)
class Service:
    """One running server. Only ``draining`` changes."""

    engine: Engine
    loaded: LoadedModels
    options: EngineOptions
    server: ServerOptions
    registry: CollectorRegistry
    defaults: SamplingDefaults
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def healthy(self) -> bool:
        """Whether new requests should come here."""
        health = self.engine.health
        return health.alive and health.stalled_seconds < STALL_SECONDS and not self.draining

    def check_open(self) -> None:
        """Refuse new work while going down."""
        if self.draining:
            raise ApiError("The server is shutting down.", 503)


def sampling_defaults(target: Path) -> SamplingDefaults:
    """Defaults that the checkpoint's ``generation_config.json`` names, SGLang's own for
    the rest.
    """
    path = target / "generation_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    names = ("temperature", "top_p", "top_k", "min_p")
    return SamplingDefaults(
        **{name: values[name] for name in names if values.get(name) is not None}
    )
