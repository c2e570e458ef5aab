"""Replicas that come and go: EndpointSlices over a real HTTP API."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.kubernetes import EndpointSlices, KubernetesApi, endpoints_of
from tests.gateway.faulty_replica import DONE, FaultyReplica, Received, event
from tests.gateway.kubernetes_api import KubernetesApiServer, endpoint_slice
from tests.gateway.running import chat, eventually, running_gateway

pytestmark = pytest.mark.anyio


class Followed:
    """What a discovery has reported."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.ready: list[str] = []
        self.reports = 0
        self.up: list[float] = []

    def take(self, urls: Mapping[str, bool]) -> None:
        self.urls = sorted(url.removeprefix("http://") for url in urls)
        self.ready = sorted(url.removeprefix("http://") for url, ready in urls.items() if ready)
        self.reports += 1


@asynccontextmanager
async def following(
    server: KubernetesApiServer, token_file: Path | None = None
) -> AsyncIterator[Followed]:
    api = KubernetesApi(server.url, "default", token_file, None)
    followed = Followed()
    slices = EndpointSlices(api, "models", "engine", "http", "http", followed.up.append)
    task = asyncio.create_task(slices.run(followed.take))
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_what_is_listed_and_what_happens_after() -> None:
    async with KubernetesApiServer() as server:
        server.put(endpoint_slice("a", ["10.0.0.1", "10.0.0.2"], 30000))
        async with following(server) as followed:
            await eventually(lambda: followed.urls == ["10.0.0.1:30000", "10.0.0.2:30000"])
            server.put(endpoint_slice("b", ["10.0.0.3"], 30001))
            await eventually(lambda: "10.0.0.3:30001" in followed.urls)
            server.put(endpoint_slice("a", ["10.0.0.1", "10.0.0.2"], 30000, ["10.0.0.1"]))
            await eventually(lambda: followed.urls == ["10.0.0.2:30000", "10.0.0.3:30001"])
            server.delete("a")
            await eventually(lambda: followed.urls == ["10.0.0.3:30001"])
            reports = followed.reports
            server.bookmark()
            server.put(endpoint_slice("b", ["10.0.0.3"], 30001))  # nothing new in it
            server.put(endpoint_slice("c", ["10.0.0.4"], 30001))
            await eventually(lambda: len(followed.urls) == 2)
            assert followed.reports == reports + 1
        assert (server.lists, len(server.watches)) == (1, 1)
        assert followed.up == [1]


async def test_a_watch_that_ends_is_resumed_where_it_was() -> None:
    async with KubernetesApiServer() as server:
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server) as followed:
            await eventually(lambda: server.watches)
            server.bookmark()
            server.end_watches()
            await eventually(lambda: len(server.watches) == 2)
            server.put(endpoint_slice("b", ["10.0.0.2"], 1))
            await eventually(lambda: len(followed.urls) == 2)
        first, second = (int(version) for version in server.watches)
        assert second == first + 1  # the bookmark's
        assert server.lists == 1


@pytest.mark.parametrize("as_status", [True, False])
async def test_after_410_gone_the_list_is_read_again(as_status: bool) -> None:
    async with KubernetesApiServer() as server:
        server.gone_as_status = as_status
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server) as followed:
            await eventually(lambda: server.watches)
            server.delete("a")
            server.put(endpoint_slice("b", ["10.0.0.2"], 1))
            server.forget()
            await eventually(lambda: followed.urls == ["10.0.0.2:1"])
            await eventually(lambda: server.lists == 2 and len(server.watches) >= 2)
            server.put(endpoint_slice("c", ["10.0.0.3"], 1))
            await eventually(lambda: len(followed.urls) == 2)


@pytest.mark.parametrize("items", [[None], [{"metadata": None}], [{}], [5], {"a": 1}])
async def test_a_list_that_cannot_be_read_is_asked_for_again(items: Any) -> None:
    async with KubernetesApiServer() as server:
        server.listing = items
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server) as followed:
            await eventually(lambda: followed.up and followed.up[-1] == 0)
            server.listing = None
            await eventually(lambda: followed.urls == ["10.0.0.1:1"])


@pytest.mark.parametrize("watching", ["forbidden", "cut", "garbled", "garbled later"])
async def test_a_watch_that_brings_nothing_is_asked_for_less_and_less_often(
    watching: Literal["forbidden", "cut", "garbled", "garbled later"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pauses are noted, not waited for; the list is followed all the same."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.01)

    monkeypatch.setattr(
        "longleaf.gateway.replicas.kubernetes.asyncio",
        SimpleNamespace(
            sleep=noted, timeout=asyncio.timeout, get_running_loop=asyncio.get_running_loop
        ),
    )
    monkeypatch.setattr("longleaf.gateway.replicas.kubernetes.random.uniform", lambda *_: 1.0)
    async with KubernetesApiServer() as server:
        server.watching = watching
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server) as followed:
            await eventually(lambda: len(pauses) >= 8)
            assert pauses[:8] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
            assert followed.urls == ["10.0.0.1:1"]
            assert (followed.up[-1] == 1) is (watching == "cut")
            server.watching = "allowed"
            server.put(endpoint_slice("b", ["10.0.0.2"], 1))
            await eventually(lambda: len(followed.urls) == 2)
            server.put(endpoint_slice("c", ["10.0.0.3"], 1))
            await eventually(lambda: len(followed.urls) == 3)
            quiet = len(pauses)
            server.end_watches()  # one that brought news: asked for again at once
            watches = len(server.watches)
            await eventually(lambda: len(server.watches) > watches)
            assert len(pauses) == quiet


async def test_while_the_api_is_away_the_last_list_stands() -> None:
    async with KubernetesApiServer() as server:
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server) as followed:
            await eventually(lambda: server.watches)
            await server.stop()
            await eventually(lambda: followed.up[-1] == 0)
            assert followed.urls == ["10.0.0.1:1"]
            server.put(endpoint_slice("b", ["10.0.0.2"], 1))
            await server.start()
            await eventually(lambda: len(followed.urls) == 2)
            await eventually(lambda: followed.up[-1] == 1)


async def test_the_token_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old\n")
    async with KubernetesApiServer(token="new") as server:
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server, path) as followed:
            await eventually(lambda: server.requests)
            path.write_text("new\n")
            await eventually(lambda: followed.urls == ["10.0.0.1:1"])


@pytest.mark.parametrize(
    ("port", "expected"),
    [(None, ":9"), ("http", ":30000"), ("8080", ":8080"), ("nothing", None)],
)
def test_ports_by_name_and_number(port: str | None, expected: str | None) -> None:
    found = list(endpoints_of(endpoint_slice("a", ["10.0.0.1"], 30000), port, "https"))
    urls = [(one.url, one.ready) for one in found]
    assert urls == ([] if expected is None else [("https://10.0.0.1" + expected, True)])


def test_ipv6_addresses_are_bracketed() -> None:
    one = {**endpoint_slice("a", ["fd00::1"], 1), "addressType": "IPv6"}
    assert [one.url for one in endpoints_of(one, "http", "http")] == ["http://[fd00::1]:1"]


def of_pod(one: dict[str, Any], uid: str) -> dict[str, Any]:
    """The slice, its first endpoint that of a pod."""
    one["endpoints"][0]["targetRef"] = {"kind": "Pod", "uid": uid}
    return one


@pytest.mark.parametrize("first", ["four", "six"])
async def test_a_pod_with_two_addresses_is_one_replica(first: str) -> None:
    slices = {
        "four": of_pod(endpoint_slice("four", ["10.0.0.1"], 1, starting=["10.0.0.1"]), "a"),
        "six": {**of_pod(endpoint_slice("six", ["fd00::1"], 1), "a"), "addressType": "IPv6"},
    }
    async with KubernetesApiServer() as server:
        server.put(slices.pop(first))
        server.put(*slices.values())
        server.put(of_pod(endpoint_slice("other", ["10.0.0.2"], 1), "b"))
        async with following(server) as followed:
            await eventually(lambda: followed.urls)
            assert followed.urls == followed.ready == ["10.0.0.1:1", "10.0.0.2:1"]
            server.delete("four")
            await eventually(lambda: followed.urls == ["10.0.0.2:1", "[fd00::1]:1"])


@pytest.mark.parametrize(
    "odd", [{"endpoints": [None]}, {"endpoints": 5}, {"ports": [None]}, {"ports": [7]}]
)
async def test_one_slice_that_cannot_be_read_hides_no_other(odd: dict[str, Any]) -> None:
    async with KubernetesApiServer() as server:
        server.put({**endpoint_slice("odd", ["10.0.0.9"], 1), **odd})
        server.put(endpoint_slice("a", ["10.0.0.1"], 1))
        async with following(server) as followed:
            await eventually(lambda: followed.urls == ["10.0.0.1:1"])
            server.put(endpoint_slice("b", ["10.0.0.2"], 1))
            await eventually(lambda: followed.urls == ["10.0.0.1:1", "10.0.0.2:1"])
            server.put(endpoint_slice("odd", ["10.0.0.9"], 1))
            await eventually(lambda: len(followed.urls) == 3)
            assert 0 not in followed.up
        assert server.lists == 1


@pytest.mark.parametrize("port", [70_000, 0, -1, None, "80"])
def test_a_port_that_is_none_is_no_endpoint(port: Any) -> None:
    one = endpoint_slice("a", ["10.0.0.1"], 1)
    one["ports"] = [{"name": "http", "port": port}]
    assert list(endpoints_of(one, None, "http")) == []
    with pytest.raises(ValueError, match="up to 65535"):
        GatewayConfig(kubernetes_service="engine", kubernetes_port="70000")


def test_outside_a_cluster_the_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="no pod of a cluster"):
        KubernetesApi.configured(None, None, None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert KubernetesApi.configured(None, None, None).url == "https://[fd00::1]:6443"


def test_replicas_are_given_or_found() -> None:
    with pytest.raises(ValueError, match="not both"):
        GatewayConfig(replicas=("http://a:1",), kubernetes_service="engine")


def of(*replicas: FaultyReplica) -> list[dict[str, Any]]:
    return [endpoint_slice(f"r{one.port}", ["127.0.0.1"], one.port) for one in replicas]


async def test_an_engine_that_warms_up_is_not_ready_though_it_answers() -> None:
    """Its pod's probe knows; once it serves, its own health alone counts, until it restarts."""
    async with KubernetesApiServer() as server, FaultyReplica() as replica:
        name, hosts = f"r{replica.port}", ["127.0.0.1"]
        warming = endpoint_slice(name, hosts, replica.port, starting=hosts)
        settings: dict[str, Any] = {
            "kubernetes_service": "models/engine",
            "kubernetes_port": "http",
            "kubernetes_api": server.url,
            "unhealthy_after": 1,
        }

        async def checked(count: int) -> None:
            wanted = replica.health_checks + count
            await eventually(lambda: replica.health_checks >= wanted)

        server.put(warming)
        async with running_gateway(**settings) as gateway:
            await checked(5)
            assert await gateway.ready() == 0
            assert (await gateway.raw(chat()))[0] == 503
            state = f'longleaf_gateway_replica_state{{replica="{replica.url}",state="starting"}}'
            assert await gateway.metric(state) == 1
            server.put(endpoint_slice(name, hosts, replica.port))
            await gateway.until_ready(1)
            server.put(warming)  # its probe fails
            await checked(5)
            assert await gateway.ready() == 1
            await replica.stop()
            await gateway.until_ready(0)
            await replica.start()
            await checked(5)
            assert await gateway.ready() == 0
            server.put(endpoint_slice(name, hosts, replica.port))
            await gateway.until_ready(1)


async def test_a_gateway_follows_its_service() -> None:
    """A replica that leaves ends its stream and gets nothing new; one that comes is used."""
    release = asyncio.Event()

    async def slow(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("first"))
        await release.wait()
        await request.chunk(DONE)
        await request.end_stream()

    async with KubernetesApiServer() as server, FaultyReplica(slow) as old, FaultyReplica() as new:
        server.put(of(old)[0])
        settings: dict[str, Any] = {
            "kubernetes_service": "models/engine",
            "kubernetes_port": "http",
            "kubernetes_api": server.url,
        }
        async with running_gateway(ready=1, **settings) as gateway:
            running = asyncio.create_task(gateway.raw(chat(stream=True)))
            await old.arrived.get()
            server.put(of(new)[0])
            await gateway.until_ready(2)
            server.put(endpoint_slice(f"r{old.port}", ["127.0.0.1"], old.port, ["127.0.0.1"]))
            await gateway.until_ready(1)
            for _ in range(3):
                assert (await gateway.raw(chat()))[0] == 200
            assert (len(old.generations), len(new.generations)) == (1, 3)
            state = f'longleaf_gateway_replica_state{{replica="{old.url}",state="draining"}}'
            assert await gateway.metric(state) == 1
            release.set()
            assert (await running)[1] == event("first") + DONE

            async def forgotten() -> bool:
                return old.url not in await gateway.metrics()

            async with asyncio.timeout(20):
                while not await forgotten():  # noqa: ASYNC110 - it lies behind HTTP
                    await asyncio.sleep(0.02)
            server.delete(f"r{new.port}")
            await gateway.until_ready(0)
            assert (await gateway.raw(chat()))[0] == 503
