"""Real models for the engine's tests, loaded once; schedulers driven by hand; real servers."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from prometheus_client import CollectorRegistry

from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.load import DEFAULT_MODELS, LoadedModels, load_models
from longleaf.embedded.model_set import Models
from longleaf.embedded.options import EngineOptions, SpeculativeAlgorithm, SpeculativeOptions
from longleaf.embedded.recorder import Recorder
from longleaf.embedded.request import GenerationRequest, StepEvent, join
from longleaf.embedded.scheduler import Scheduler
from longleaf.embedded.target import Segment
from longleaf.metrics import EngineMetrics

# A busy machine must not fail a test, and neither must luck.
settings.register_profile("longleaf", deadline=None, derandomize=True, database=None)
settings.load_profile("longleaf")

MODELS = Path(os.environ.get("LONGLEAF_TEST_MODELS", DEFAULT_MODELS))


class Bench:
    """A scheduler driven by hand, and the events of every request."""

    def __init__(self, scheduler: Scheduler, models: Models, registry: CollectorRegistry) -> None:
        self.scheduler = scheduler
        self.models = models
        self.registry = registry
        self.requests: dict[str, GenerationRequest] = {}
        self.events: dict[str, list[StepEvent]] = {}

    def add(self, request: GenerationRequest) -> None:
        events = self.events.setdefault(request.rid, [])
        self.requests.setdefault(request.rid, request)
        self.scheduler.add(request, events.append)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.scheduler.step()
        raise AssertionError(f"requests still there after {limit} steps")

    def complete(self, *requests: GenerationRequest) -> list[StepEvent]:
        """Run ``requests`` together; the whole answer of each."""
        for request in requests:
            self.add(request)
        self.run()
        return [self.answer(request.rid) for request in requests]

    def has_ended(self, rid: str) -> bool:
        return any(event.finish is not None for event in self.events[rid])

    def answer(self, rid: str) -> StepEvent:
        events = self.events[rid]
        whole = events[0]
        for event in events[1:]:
            whole = join(whole, event)
        assert whole.finish is not None, f"{rid} has not ended"
        assert sum(event.finish is not None for event in events) == 1
        return whole

    def check_cached_rows(self, rid: str) -> int:
        """Assert that the cache holds, for the tokens of ``rid``, the rows that one fresh pass over
        them computes; how many rows there are.
        """
        request, models = self.requests[rid], self.models
        tokens = np.array([*request.prompt, *self.answer(rid).tokens])
        kind = "draft" if request.speculative else "plain"
        slots = self.scheduler.memory.cache.match(tokens, f"{kind}:{request.cache_salt}").slots
        rows = np.arange(len(slots))
        if not len(rows):
            return 0
        drafter = models.drafter if request.speculative else None
        config = None if drafter is None else drafter.config
        fresh = KvPool(models.target.config, config, len(rows))
        output = models.target.forward([Segment(tokens[rows], rows, rows, rows[:0])], fresh)
        if drafter is not None:
            drafter.extend(output.features, rows, rows, fresh)
        for held, computed in zip(models.pool.arrays(), fresh.arrays(), strict=True):
            if computed.size:
                np.testing.assert_allclose(held[..., slots, :], computed, rtol=1e-3, atol=1e-3)
        return len(rows)

    def owners(self) -> tuple[int, int, int]:
        """Slots used by requests, cached, free: counted slot by slot."""
        memory = self.scheduler.memory
        memory.slots.audit()
        counts = (memory.used, memory.cache.num_evictable, memory.slots.num_free)
        assert sum(counts) == memory.slots.capacity
        return counts


MakeBench = Callable[..., Bench]


@pytest.fixture(scope="session")
def engine_options() -> EngineOptions:
    return EngineOptions(
        target=MODELS / "tiny-target",
        drafter=MODELS / "tiny-drafter",
        served_model_name="tiny",
        max_total_tokens=4096,
    )


@pytest.fixture(scope="session")
def loaded(engine_options: EngineOptions) -> LoadedModels:
    return load_models(engine_options)


@pytest.fixture(scope="session")
def fresh(loaded: LoadedModels, engine_options: EngineOptions) -> Callable[..., LoadedModels]:
    """The same weights with a pool and limits of their own."""

    def make(**limits: int | None) -> LoadedModels:
        bounds = replace(loaded.limits, **{"max_total_tokens": 2048, **limits})  # type: ignore[arg-type]
        target, drafter = loaded.models.target, loaded.models.drafter
        assert drafter is not None
        pool = KvPool(target.config, drafter.config, bounds.max_total_tokens)
        return replace(loaded, models=replace(loaded.models, pool=pool), limits=bounds)

    return make


@pytest.fixture
def make_bench(
    fresh: Callable[..., LoadedModels], engine_options: EngineOptions
) -> Iterator[MakeBench]:
    """Builds schedulers; at the end of the test each must have given back every slot."""
    made: list[Bench] = []

    def make(
        speculative: SpeculativeOptions | None = None,
        edit: Callable[[LoadedModels], LoadedModels] = lambda models: models,
        **limits: int | None,
    ) -> Bench:
        registry = CollectorRegistry()
        recorder = Recorder(EngineMetrics(registry))
        options = replace(engine_options, speculative=speculative or SpeculativeOptions())
        models = edit(fresh(**limits))
        bench = Bench(models.scheduler(options, recorder), models.models, registry)
        made.append(bench)
        return bench

    yield make
    for bench in made:
        if bench.scheduler.idle:
            assert bench.owners()[0] == 0
            bench.scheduler.memory.cache.clear()
            assert bench.owners() == (0, 0, bench.scheduler.memory.slots.capacity)


@pytest.fixture(scope="session")
def plain() -> SpeculativeOptions:
    return SpeculativeOptions(algorithm=SpeculativeAlgorithm.NONE)


@pytest.fixture(scope="session")
def ask(loaded: LoadedModels) -> Callable[..., GenerationRequest]:
    """A request from text or ids."""
    count = iter(range(10**9))

    def make(prompt: str | Sequence[int], **fields: object) -> GenerationRequest:
        ids = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        values: dict[str, object] = {
            "rid": f"r{next(count)}",
            "prompt": np.asarray(ids, dtype=np.int64),
            "max_tokens": 32,
            "ignore_eos": True,
        }
        return GenerationRequest(**{**values, **fields})  # type: ignore[arg-type]

    return make


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of every event of a stream, which must end with [DONE]."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class ServerProcess:
    """A real ``longleaf embedded`` on a free port."""

    def __init__(self, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "longleaf", "embedded", "--port", str(self.port)),
                *("--model-path", str(MODELS / "tiny-target")),
                *("--speculative-draft-model-path", str(MODELS / "tiny-drafter")),
                *options,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.01)

    def healthy(self) -> bool:
        try:
            return self.get("/health").status == 200
        except ConnectionRefusedError:
            return False

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())

    def get(self, path: str) -> Reply:
        return self.send("GET", path, None, {})

    def post(self, path: str, body: object) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, raw, {"Content-Type": "application/json"})

    def chat(self, content: str = "Count from 1 to 40.", **fields: object) -> Reply:
        messages = [{"role": "user", "content": content}]
        body = {"model": "tiny", "messages": messages, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/chat/completions", body | {"max_tokens": 24} | fields)

    def open_stream(
        self, content: str, **fields: object
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream that the caller reads, and closes."""
        connection = self.connect()
        self.send_chat(connection, content, stream=True, **fields)
        return connection, connection.getresponse()

    def send_chat(
        self, connection: http.client.HTTPConnection, content: str, **fields: object
    ) -> None:
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "temperature": 0, "ignore_eos": True} | fields
        raw = json.dumps(body).encode()
        connection.request(
            "POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"}
        )

    def load(self) -> Any:
        return self.get("/v1/loads").json["loads"][0]

    def stop(self) -> int:
        """End it as an operator would; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode


StartServer = Callable[..., ServerProcess]
LIMITS = (
    *("--context-length", "8192", "--max-total-tokens", "4096", "--served-model-name", "tiny"),
    *("--max-running-requests", "4", "--max-queued-requests", "2"),
)


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Starts servers and waits until they are healthy; stops them at the end of the module."""
    started: list[ServerProcess] = []

    def start(*options: str) -> ServerProcess:
        server = ServerProcess(*LIMITS, *options)
        started.append(server)
        server.until(server.healthy)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> ServerProcess:
    return start_server()
