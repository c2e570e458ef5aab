"""An engine that died or hangs: the server says so, and leaves nobody waiting."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from longleaf.embedded.engine import Engine
from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import EngineOptions
from longleaf.embedded.server.app import build_app
from longleaf.embedded.server.service import ServerOptions, Service
from longleaf.metrics import EngineMetrics

from .conftest import ServerProcess


class InProcess(ServerProcess):
    """The same client, with a server in a thread of this process: its engine can be broken."""

    def __init__(self, service: Service, port: int) -> None:
        self.service = service
        self.port = port

    @property
    def engine(self) -> Engine:
        assert isinstance(self.service.engine, Engine)
        return self.service.engine

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        done = threading.Event()
        for _ in range(int(seconds * 100)):
            if condition():
                return
            done.wait(0.01)
        raise AssertionError("the condition never came true")


@pytest.fixture
def broken(
    fresh: Callable[..., LoadedModels], engine_options: EngineOptions
) -> Iterator[InProcess]:
    loaded, registry = fresh(), CollectorRegistry()
    with loaded.start(engine_options, EngineMetrics(registry)) as engine:
        options = ServerOptions("127.0.0.1", 0, 1 << 20, 5.0, stall_seconds=0.6)
        service = Service(engine, loaded, engine_options, options, registry)
        config = uvicorn.Config(build_app(service), port=0, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        waiting = threading.Event()
        while not server.started:
            waiting.wait(0.01)
        yield InProcess(service, server.servers[0].sockets[0].getsockname()[1])
        server.should_exit = True
        thread.join(30)


def test_a_dead_engine(broken: InProcess) -> None:
    assert broken.get("/health").status == 200
    connection, answer = broken.open_stream("Count to 900", max_tokens=1500)
    answer.readline()
    broken.engine._scheduler.memory.slots._num_free = 0
    body = answer.read()
    connection.close()
    assert body.endswith(b"data: [DONE]\n\n")
    error = json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (503, "SERVICE_UNAVAILABLE")
    assert "the engine's thread died: SlotError" in error["message"]
    for path in ("/health", "/health_generate"):
        assert broken.get(path).status == 503
    for stream in (False, True):
        reply = broken.chat(stream=stream)
        assert (reply.status, reply.json["code"]) == (503, 503)
        assert "died" in reply.json["message"]
    assert broken.get("/server_info").json["status"] == "unhealthy"
    assert broken.get("/v1/models").status == broken.get("/metrics").status == 200


def test_a_hung_engine(broken: InProcess) -> None:
    """Health fails after the stall time; status routes answer from the last snapshot."""
    release = threading.Event()

    def hang(commands: object) -> None:
        release.wait(60)

    broken.engine._post(hang)
    with contextlib.ExitStack() as stack:
        stack.callback(release.set)
        broken.until(lambda: broken.get("/health").status == 503)
        assert broken.get("/health_generate").status == 503
        frozen = broken.load()["timestamp"]
        outer = broken.get("/v1/loads").json
        assert outer["loads"][0]["timestamp"] == frozen
        assert broken.get("/server_info").json["status"] == "unhealthy"
        assert broken.get("/metrics").status == 200
    broken.until(broken.healthy)
    assert broken.chat(max_tokens=3).json["usage"]["completion_tokens"] == 3
