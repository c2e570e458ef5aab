"""Gateways that run for a test, and clients of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.server import GatewayServer
from longleaf.gateway.tracing import Tracing
from tests.gateway.faulty_replica import Behaviour, FaultyReplica

CHAT = "/v1/chat/completions"
LIMIT = 20.0
"""Seconds after which a condition that should hold soon is given up; no test waits for it."""


async def eventually(condition: Callable[[], object]) -> None:
    """Return when ``condition()`` holds."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - the condition may lie anywhere
            await asyncio.sleep(0.005)


@dataclass
class Gateway:
    """A gateway that runs, and a client of it."""

    server: GatewayServer
    http: aiohttp.ClientSession
    url: str

    def post(
        self, body: object, path: str = CHAT, **options: Any
    ) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        return self.http.post(self.url + path, json=body, **options)

    async def answer(
        self, body: object, path: str = CHAT, **options: Any
    ) -> tuple[int, dict[str, Any], aiohttp.ClientResponse]:
        """Status, parsed body and response of one request."""
        async with self.post(body, path, **options) as response:
            return response.status, await response.json(), response

    async def raw(
        self, body: object, path: str = CHAT, **options: Any
    ) -> tuple[int, bytes, aiohttp.ClientResponse]:
        """Status, bytes and response of one request."""
        async with self.post(body, path, **options) as response:
            return response.status, await response.read(), response

    async def ready(self) -> int:
        async with self.http.get(self.url + "/readyz") as response:
            body = await response.json()
            return int(body["ready_replicas"]) if response.status == 200 else 0

    async def until_ready(self, count: int) -> None:
        async with asyncio.timeout(LIMIT):
            while await self.ready() != count:  # noqa: ASYNC110 - it lies behind HTTP
                await asyncio.sleep(0.005)

    async def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.server.metrics_port}/metrics"
        async with self.http.get(url) as response:
            return await response.text()

    async def metric(self, sample: str) -> float:
        """Value of the sample that is written ``sample`` (name and labels); 0 if absent."""
        for line in (await self.metrics()).splitlines():
            if line.startswith(sample + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@asynccontextmanager
async def running_gateway(
    *urls: str, ready: int = 0, tracing: Tracing | None = None, **settings: Any
) -> AsyncIterator[Gateway]:
    """A gateway over real sockets, in this loop, once ``ready`` replicas are ready, or at once."""
    quick = {"recovery_interval": 0.02, "health_interval": 0.05, "port": 0, "metrics_port": 0}
    config = GatewayConfig(replicas=urls, **{**quick, **settings})
    server = GatewayServer(config, tracing)
    async with server.running(), aiohttp.ClientSession() as http:
        gateway = Gateway(server, http, f"http://127.0.0.1:{server.port}")
        if ready:
            await gateway.until_ready(ready)
        yield gateway


@asynccontextmanager
async def gateway_over(
    *behaviours: Behaviour, **settings: Any
) -> AsyncIterator[tuple[Gateway, list[FaultyReplica]]]:
    """A gateway over one replica for each behaviour, all ready; routed in turn, first one first."""
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(FaultyReplica(behaviour)) for behaviour in behaviours
        ]
        settings.setdefault("routing", "round_robin")
        urls = [replica.url for replica in replicas]
        gateway = await stack.enter_async_context(
            running_gateway(*urls, ready=len(urls), **settings)
        )
        yield gateway, replicas


def chat(**fields: object) -> dict[str, object]:
    """A valid chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello server"}], **fields}
