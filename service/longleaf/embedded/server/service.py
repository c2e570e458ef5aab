"""What the routes share: the engine, the model's facts, the limits, and whether the server is going
down.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from longleaf.ddtree import SamplingParams
from longleaf.embedded.engine import EngineHealth, GenerationStream
from longleaf.embedded.load import ModelInfo
from longleaf.embedded.loads import LoadSnapshot
from longleaf.embedded.options import EngineOptions, SchedulerOptions
from longleaf.embedded.recorder import VerifiedTree
from longleaf.embedded.request import GenerationRequest
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """What the routes ask of an engine; nothing here waits."""

    @property
    def snapshot(self) -> LoadSnapshot:
        """The scheduler's figures after its last step."""

    @property
    def health(self) -> EngineHealth:
        """Whether it lives and moves."""

    def stream(self, request: GenerationRequest) -> GenerationStream:
        """Submit ``request`` and iterate its events; closing the stream aborts it."""

    def abort(self, prefix: str) -> None:
        """End every request whose id begins with ``prefix``."""


class ServedModel(Protocol):
    """What the routes tell of the model, and read prompts with."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's."""

    @property
    def info(self) -> ModelInfo:
        """Names and sizes."""

    @property
    def limits(self) -> SchedulerOptions:
        """Of the scheduler."""

    @property
    def sampling(self) -> SamplingParams:
        """What a request that says nothing about sampling gets."""

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the KV pool."""

    @property
    def block_size(self) -> int | None:
        """Anchor and drafted depths of the drafter; None without one."""


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
    show_draft_text: bool = False
    """Whether /longleaf/trees tells the text of drafts, which is users' text."""


@dataclass(slots=True)
class Service:
    """One running server. Only ``draining`` changes.

    ``fingerprint`` is every answer's ``system_fingerprint``: what an engine that is not one says.
    """

    engine: ServedEngine
    loaded: ServedModel
    options: EngineOptions
    server: ServerOptions
    registry: CollectorRegistry
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    fingerprint: str | None = None
    trees: Callable[[], Sequence[VerifiedTree]] = tuple
    """The last draft trees; none where the engine keeps none."""

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
