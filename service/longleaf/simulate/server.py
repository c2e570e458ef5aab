"""Many simulated replicas in one process, a port each, and the label on all that they say."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longleaf.ddtree import SamplingParams
from longleaf.embedded.load import ModelInfo
from longleaf.embedded.loads import LoadCounters, LoadSnapshot
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.options import EngineOptions, SchedulerOptions, SpeculativeOptions
from longleaf.embedded.scheduler import Scheduler
from longleaf.embedded.server.app import build_app
from longleaf.embedded.server.run import DrainingServer
from longleaf.embedded.server.service import ServerOptions, Service
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.metrics import EngineMetrics, SglangMetrics, SimulationMetrics
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve
from longleaf.simulate.engine import SimulatedEngine
from longleaf.simulate.executor import EVICT_AT_LEAST, Pace, SimulatedExecutor

HEADER = b"x-longleaf-simulated"
_ANSWER = "This answer is simulated. "
_CLOSE_SECONDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What every replica of a process is like."""

    curve: Curve
    commits: CommitLengths
    pace: Pace
    tokenizer_path: Path
    tokenizer: Tokenizer
    limits: SchedulerOptions
    served_model_name: str

    @property
    def fingerprint(self) -> str:
        """The label: curve and speed."""
        return f"simulated:{self.curve.name}:x{self.pace.speed:g}"


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What the routes tell of a model that is not there."""

    tokenizer: Tokenizer
    info: ModelInfo
    limits: SchedulerOptions
    sampling: SamplingParams
    kv_cache_bytes: int
    block_size: int | None


class Replicas:
    """The ASGI application of all replicas: the port tells which one is meant."""

    def __init__(self, apps: dict[int, ASGIApp], label: str) -> None:
        self._apps = apps
        self._header = (HEADER, label.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the ASGI server."""

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._apps[scope["server"][1]](scope, receive, labelled)


class _Labelled(Collector):
    """A registry whose samples all carry ``simulated``."""

    def __init__(self, registry: CollectorRegistry, label: str) -> None:
        self._registry = registry
        self._label = {"simulated": label}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._label})
                for sample in metric.samples
            ]
            yield metric


def build_replica(simulation: Simulation, server: ServerOptions) -> Service:
    """One replica, running; needs an event loop. Close its engine when done."""
    registry, shown = CollectorRegistry(), CollectorRegistry()
    shown.register(_Labelled(registry, simulation.fingerprint))
    metrics = EngineMetrics(registry)
    limits, curve, tokenizer = simulation.limits, simulation.curve, simulation.tokenizer
    memory, counters = KvMemory(limits.max_total_tokens, EVICT_AT_LEAST), LoadCounters()
    answer = tokenizer.encode(_ANSWER, add_special_tokens=False)
    executor = SimulatedExecutor(
        curve, simulation.commits, simulation.pace, answer, memory, counters, metrics
    )
    scheduler = Scheduler(executor, memory, counters, tokenizer, tokenizer.vocab_size, limits)

    def publish(snapshot: LoadSnapshot) -> None:
        pool = metrics.kv_pool_tokens
        pool.labels("used").set(snapshot.num_used_tokens)
        pool.labels("cached").set(snapshot.num_cached_tokens)
        pool.labels("free").set(snapshot.num_free_tokens)

    engine = SimulatedEngine(scheduler, executor, publish)
    SimulationMetrics(registry).lost_seconds.set_function(lambda: engine.lost_seconds)
    SglangMetrics(registry, simulation.served_model_name, lambda: engine.snapshot.engine_load())
    info = ModelInfo(
        simulation.served_model_name,
        str(simulation.tokenizer_path),
        "simulated",
        ("Simulated",),
        limits.context_length,
        tokenizer.vocab_size,
        0,
    )
    kv_bytes = int(limits.max_total_tokens * curve.kv_bytes_per_token)
    speculates = curve.nodes > 1
    block = max(len(shares) for shares in simulation.commits.cumulative.values())
    model = SimulatedModel(
        tokenizer, info, limits, SamplingParams(), kv_bytes, block if speculates else None
    )
    options = EngineOptions(
        target=simulation.tokenizer_path,
        drafter=simulation.tokenizer_path,
        served_model_name=simulation.served_model_name,
        speculative=SpeculativeOptions(budget=max(1, curve.nodes - 1)),
    )
    return Service(engine, model, options, server, shown, fingerprint=simulation.fingerprint)


def serve_simulation(
    simulation: Simulation, host: str, ports: Sequence[int], server: ServerOptions, log_level: str
) -> None:
    """Serve a replica on each of ``ports`` until a signal comes. ``OSError`` names the port."""
    logging.basicConfig(level=log_level.upper())
    with ExitStack() as stack:
        sockets = [stack.enter_context(_listen(host, port)) for port in ports]
        uvloop.run(_serve(simulation, sockets, server, log_level))


async def _serve(
    simulation: Simulation, sockets: list[socket.socket], server: ServerOptions, log_level: str
) -> None:
    services: list[Service] = []
    apps: dict[int, ASGIApp] = {}
    for one in sockets:
        service = build_replica(simulation, server)
        services.append(service)
        apps[one.getsockname()[1]] = build_app(service)
    config = uvicorn.Config(
        Replicas(apps, simulation.fingerprint),
        log_level=log_level,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    await DrainingServer(config, services).serve(sockets)
    for service in services:
        assert isinstance(service.engine, SimulatedEngine)
        await service.engine.close()
    await asyncio.sleep(0)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048)
    except socket.gaierror as error:
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror})") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise OSError(f"cannot listen on {host}:{port} ({reason}){_remedy(error.errno)}") from None


def _remedy(number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return "; choose another port"
    if number in {errno.EMFILE, errno.ENFILE}:
        return "; raise the limit of open files (ulimit -n): each replica and each client takes one"
    return ""
