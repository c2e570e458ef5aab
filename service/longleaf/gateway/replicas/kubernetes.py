"""Follows the EndpointSlices of a Kubernetes Service: list, watch, resume, list again.

The watch is resumed where it ended. After 410 Gone (the version is too old), and after any error,
the list is read again: what happened meanwhile is in it. Whatever brings nothing new is asked for
less and less often.
"""

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from longleaf.gateway.replicas.client import RawHeaders, ReplicaClient
from longleaf.gateway.replicas.connection import Connection

logger = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH_SECONDS = 240
"""After which the server is asked to end a watch; one that stays silent longer is dead."""
_GRACE_SECONDS = 30
_REQUEST_SECONDS = 15
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0


class WatchError(Exception):
    """The API did not answer, or not with what was asked for."""


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """How to reach the API server."""

    url: str
    namespace: str
    """The gateway's own."""
    token_file: Path | None
    """Read at every request: tokens are renewed in place."""
    ca_file: Path | None

    @classmethod
    def configured(
        cls, url: str | None, token_file: Path | None, ca_file: Path | None
    ) -> "KubernetesApi":
        """As given; what is not given is what a pod finds in its environment.

        ``ValueError`` outside a cluster where no ``url`` is given.
        """
        if url is None:
            host = os.environ.get("KUBERNETES_SERVICE_HOST")
            if not host:
                raise ValueError("kubernetes_api is not given, and this is no pod of a cluster")
            host = f"[{host}]" if ":" in host else host
            url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        namespace = _ACCOUNT / "namespace"
        return cls(
            url.rstrip("/"),
            namespace.read_text().strip() if namespace.is_file() else "default",
            token_file or _existing(_ACCOUNT / "token"),
            ca_file or _existing(_ACCOUNT / "ca.crt"),
        )

    def client(self) -> ReplicaClient:
        """A client of the API server. ``OSError`` for a CA file that cannot be read."""
        tls = ssl.create_default_context(cafile=self.ca_file)
        return ReplicaClient(self.url, _REQUEST_SECONDS, None, tls)

    def headers(self) -> RawHeaders:
        """With the service account's token as it is now."""
        headers = [(b"accept", b"application/json")]
        if self.token_file is not None:
            token = self.token_file.read_bytes().strip()
            headers.append((b"authorization", b"Bearer " + token))
        return headers


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a pod."""

    url: str
    ready: bool
    pod: str
    """Its pod's uid, or ``url`` where that is not told."""
    rank: tuple[bool, str]
    """Of two of one pod, the lower one counts."""


class EndpointSlices:
    """The base URLs behind one Service."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service: str,
        port: str | None,
        scheme: str,
        note_up: Callable[[float], None] = lambda up: None,
    ) -> None:
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"
        self._port = port
        self._scheme = scheme
        self._note_up = note_up
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._version = ""
        self._reported: Mapping[str, bool] | None = None
        self._odd: dict[str, Mapping[str, Any]] = {}
        """Slices that cannot be read, as they were when it was said."""

    async def run(self, on_change: Callable[[Mapping[str, bool]], None]) -> None:
        """Report the URLs, and every change of them, for ever."""
        loop = asyncio.get_running_loop()
        pause, listed = _FIRST_PAUSE, False
        client = self._api.client()
        try:
            while True:
                began, news = loop.time(), False
                try:
                    if not listed:
                        await self._list(client)
                        self._report(on_change)
                        listed = True
                    async for _ in self._watch(client):
                        news = True
                        self._report(on_change)
                except Exception as error:  # an answer may be of any shape
                    listed = False
                    self._note_up(0)
                    fields = {"path": self._path, "why": str(error) or type(error).__name__}
                    logger.warning("discovery: list again", extra={"fields": fields})
                # An error soon after an event is one that comes again and again.
                if (news and listed) or loop.time() - began >= _LONGEST_PAUSE:
                    pause = _FIRST_PAUSE
                    if listed:
                        continue
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            await client.close()

    async def _list(self, client: ReplicaClient) -> None:
        async with self._get(client, {}) as connection:
            text = b""
            async with asyncio.timeout(_REQUEST_SECONDS):
                while part := await connection.read():
                    text += part
        answer = _object(text)
        items = answer.get("items")
        if not isinstance(items, list):
            raise WatchError("the list has no items")
        self._slices = {item["metadata"]["name"]: item for item in items}
        self._version = answer["metadata"]["resourceVersion"]

    async def _watch(self, client: ReplicaClient) -> AsyncIterator[None]:
        """Apply events, bookmarks too, until the server ends the watch in order."""
        query = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with self._get(client, query) as connection:
            self._note_up(1)
            async for line in _lines(connection):
                event = _object(line)
                changed = event.get("object") or {}
                if event.get("type") == "ERROR":
                    raise WatchError(f"{changed.get('code')}: {changed.get('message')}")
                self._version = changed["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self._slices.pop(changed["metadata"]["name"], None)
                elif event["type"] != "BOOKMARK":
                    self._slices[changed["metadata"]["name"]] = changed
                yield

    @asynccontextmanager
    async def _get(
        self, client: ReplicaClient, query: Mapping[str, str]
    ) -> AsyncIterator[Connection]:
        """An answer whose status is 200, to be read."""
        asked = urlencode({"labelSelector": self._selector, **query})
        async with asyncio.timeout(_REQUEST_SECONDS):
            connection = await client.begin("GET", f"{self._path}?{asked}", self._api.headers(), ())
        try:
            if connection.status != 200:
                raise WatchError(f"the API server answered {connection.status}")
            yield connection
        finally:
            client.end(connection)

    def _report(self, on_change: Callable[[Mapping[str, bool]], None]) -> None:
        found: dict[str, bool] = {}
        for url, ready in replicas_of(self._readable()):
            found[url] = ready or found.get(url, False)
        if found != self._reported:
            on_change(dict(sorted(found.items())))
            self._reported = found

    def _readable(self) -> Iterator[Endpoint]:
        """The endpoints of all slices, but for slices that are of another shape."""
        for name, one in self._slices.items():
            try:
                yield from tuple(endpoints_of(one, self._port, self._scheme))
            except Exception as error:
                if self._odd.get(name) is not one:
                    self._odd[name] = one
                    fields = {"slice": name, "why": str(error) or type(error).__name__}
                    logger.error("discovery: slice cannot be read", extra={"fields": fields})


def replicas_of(endpoints: Iterable[Endpoint]) -> Iterator[tuple[str, bool]]:
    """Base URL of each pod, and whether it is ready. A pod of a Service with two address families
    is in a slice of each, and one replica all the same: by its IPv4 address.
    """
    chosen: dict[str, Endpoint] = {}
    for one in endpoints:
        known = chosen.get(one.pod)
        if known is None:
            chosen[one.pod] = one
            continue
        first, other = (known, one) if known.rank <= one.rank else (one, known)
        chosen[one.pod] = replace(first, ready=first.ready or other.ready)
    for one in chosen.values():
        yield one.url, one.ready


def endpoints_of(one: Mapping[str, Any], port: str | None, scheme: str) -> Iterator[Endpoint]:
    """A slice's endpoints, by port number or name (default: its first port).

    One that terminates is none: what it runs may end, nothing new comes.
    """
    ports = [entry for entry in one.get("ports") or () if _is_port(entry.get("port"))]
    if port is not None and port.isdigit():
        number: int | None = int(port)
    else:
        chosen = [entry for entry in ports if port is None or entry.get("name") == port]
        number = chosen[0]["port"] if chosen else None
    if number is None:
        return
    kind = str(one.get("addressType"))
    for endpoint in one.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        if conditions.get("terminating"):
            continue
        ready = conditions.get("ready") is not False  # null: unknown, to be taken for ready
        for address in (endpoint.get("addresses") or ())[:1]:
            host = f"[{address}]" if kind == "IPv6" else address
            url = f"{scheme}://{host}:{number}"
            pod = (endpoint.get("targetRef") or {}).get("uid") or url
            yield Endpoint(url, ready, pod, (kind != "IPv4", url))


def _is_port(value: object) -> bool:
    return isinstance(value, int) and 0 < value < 65_536


async def _lines(connection: Connection) -> AsyncIterator[bytes]:
    held = b""
    while True:
        async with asyncio.timeout(_WATCH_SECONDS + _GRACE_SECONDS):
            part = await connection.read()
        if not part:
            return
        *whole, held = (held + part).split(b"\n")
        for line in whole:
            if line.strip():
                yield line


def _object(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise WatchError("not a JSON object")
    return value


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None
