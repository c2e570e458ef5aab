"""A small API server for EndpointSlices: it lists and watches over real HTTP, as the real one does.

Versions count up with every change. A watch gets what happened after its version; one older than
what is remembered gets 410 Gone, as a status or as an event.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint_slice(
    name: str,
    addresses: Sequence[str],
    port: int,
    terminating: Sequence[str] = (),
    starting: Sequence[str] = (),
) -> dict[str, Any]:
    """A slice of ``addresses``, those in ``terminating`` on their way out, in ``starting`` in."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "engine"}},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {
                    "ready": address not in {*terminating, *starting},
                    "serving": address not in starting,
                    "terminating": address in terminating,
                },
            }
            for address in addresses
        ],
    }


class KubernetesApiServer:
    """Use as an async context manager. ``stop`` and ``start`` restart it on its port."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.listing: Any = None
        """What a list says its items are, in place of the slices."""
        self.gone_as_status = False
        self.watching: Literal["allowed", "forbidden", "cut", "garbled", "garbled later"] = (
            "allowed"
        )
        """What becomes of a watch."""
        self.requests: list[dict[str, str]] = []
        """Queries, in order."""
        self.port = 0
        self._version = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._oldest = 100
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def watches(self) -> list[str]:
        """Versions that watches began at."""
        return [query["resourceVersion"] for query in self.requests if "watch" in query]

    @property
    def lists(self) -> int:
        return sum("watch" not in query for query in self.requests)

    async def __aenter__(self) -> "KubernetesApiServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Go away, connections and all."""
        if self._runner is not None:
            self.end_watches()
            await self._runner.cleanup()
            self._runner = None

    def put(self, one: dict[str, Any]) -> None:
        """Make or change a slice."""
        name = one["metadata"]["name"]
        self._happen("MODIFIED" if name in self._slices else "ADDED", one)
        self._slices[name] = one

    def delete(self, name: str) -> None:
        self._happen("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        self._happen("BOOKMARK", {"metadata": {}})

    def forget(self) -> None:
        """Compact: watches from before now are too old."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()
        self.end_watches()

    def end_watches(self) -> None:
        """End running watches in order, as the server does now and then."""
        self._ending.set()
        self._ending = asyncio.Event()
        self._wake()

    def _happen(self, kind: str, one: dict[str, Any]) -> None:
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, {"type": kind, "object": json.loads(json.dumps(one))}))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append(query)
        authorization = request.headers.get("authorization")
        if self.token is not None and authorization != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        assert query["labelSelector"] == "kubernetes.io/service-name=engine"
        if query.get("watch") != "true":
            items = list(self._slices.values()) if self.listing is None else self.listing
            metadata = {"resourceVersion": str(self._version)}
            return web.json_response({"metadata": metadata, "items": items})
        return await self._watch(request, int(query["resourceVersion"]))

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        if self.watching == "forbidden":
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if version < self._oldest and self.gone_as_status:
            return web.json_response(gone, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.watching == "garbled later":
            bookmark = {"metadata": {"resourceVersion": str(self._version)}}
            marked = json.dumps({"type": "BOOKMARK", "object": bookmark})
            await response.write(marked.encode() + b"\n")
        if self.watching.startswith("garbled"):
            await response.write(b'{"type": "ADDED", "object": [null]}\n')
        if self.watching != "allowed":
            return response
        if version < self._oldest:
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        ending = self._ending
        while True:
            changed = self._changed
            for at, event in [one for one in self._events if one[0] > version]:
                text = json.dumps(event).encode() + b"\n"
                half = len(text) // 2  # a line may come in any pieces
                await response.write(text[:half])
                await response.write(text[half:])
                version = at
            if ending.is_set():
                return response
            await changed.wait()
