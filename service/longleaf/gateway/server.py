"""Runs the gateway: a public port, an admin port for metrics and status, signals, the drain."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from longleaf.gateway.app import build_app
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.drain import Drain
from longleaf.gateway.files import file_version
from longleaf.gateway.protocol import ConnectionLimits, OnRefusal, http_protocol
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.tracing import Tracing
from longleaf.ui.routes import ui_routes
from longleaf.ui.state import Watch

logger = logging.getLogger(__name__)

_KEEPALIVE_SECONDS = 75
"""Idle client connections; longer than the minute after which load balancers give them up."""
_BACKLOG = 4096


class PortError(Exception):
    """A port that cannot be listened on."""


class _Server(uvicorn.Server):
    """uvicorn, with signals left to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def listen(host: str, port: int, option: str) -> socket.socket:
    """A listening socket; ``PortError`` names the option, host and port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortError(f"{option}: cannot listen on {host}:{port}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or error
        raise PortError(f"{option}: cannot listen on {host}:{port}: {reason}") from error
    return sock


class GatewayServer:
    """A gateway that listens. ``ValueError`` or ``PortError`` where it cannot."""

    def __init__(self, config: GatewayConfig, tracing: Tracing | None = None) -> None:
        self._config = config
        self.drain = Drain()
        prometheus = CollectorRegistry()
        ProcessCollector(registry=prometheus)
        app, registry = build_app(config, self.drain, prometheus, tracing)
        self._sockets = [listen(config.host, config.port, "--port")]
        try:
            self._sockets.append(listen(config.metrics_host, config.metrics_port, "--metrics-port"))
        except PortError:
            self._sockets[0].close()
            raise
        self.port: int = self._sockets[0].getsockname()[1]
        self.metrics_port: int = self._sockets[1].getsockname()[1]
        limits = ConnectionLimits(
            config.header_timeout, config.write_timeout, _KEEPALIVE_SECONDS, config.max_header_bytes
        )
        tls = (config.tls_certificate_file, config.tls_key_file)
        self._public = _server(app, limits, app.refuse, "on", tls)
        admin = _admin_app(prometheus, registry)
        self._admin = _server(admin, limits, lambda _: None, "off")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve both ports inside the block; close everything at its end."""
        public, admin = self._public, self._admin
        tasks = [
            asyncio.create_task(public.serve(self._sockets[:1])),
            asyncio.create_task(admin.serve(self._sockets[1:])),
        ]
        try:
            while not (public.started and admin.started):
                ended = [task for task in tasks if task.done()]
                if ended:
                    raise RuntimeError("the server ended while starting") from ended[0].exception()
                await asyncio.sleep(0.01)
            tasks.append(asyncio.create_task(self._follow_certificate()))
            yield
        finally:
            self.drain.begin()
            self.drain.expire()
            public.should_exit = admin.should_exit = True
            for task in tasks[2:]:
                task.cancel()
            await asyncio.gather(*tasks[:2])
            await asyncio.gather(*tasks[2:], return_exceptions=True)

    async def _follow_certificate(self) -> None:
        """Use the certificate anew whenever its files change: they are renewed in place."""
        certificate, key = self._config.tls_certificate_file, self._config.tls_key_file
        context = self._public.config.ssl
        if context is None or certificate is None or key is None:
            return
        seen = file_version(certificate), file_version(key)
        while True:
            await asyncio.sleep(self._config.key_reload_interval)
            version = file_version(certificate), file_version(key)
            if version == seen:
                continue
            seen = version
            try:
                context.load_cert_chain(certificate, key)
            except (OSError, ssl.SSLError) as error:
                logger.error("certificate not read again", extra={"fields": {"why": str(error)}})
            else:
                logger.info("certificate read again", extra={"fields": {"file": str(certificate)}})

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends running answers."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def on_signal(name: str) -> None:
            if self.drain.draining:
                self.drain.expire()
            self.drain.begin()
            stop.set()
            fields = {"signal": name, "running": self.drain.running}
            logger.info("draining", extra={"fields": fields})

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number.name)
        async with self.running():
            config = self._config
            fields = {
                "url": f"http://{config.host}:{self.port}",
                "metrics": f"http://{config.metrics_host}:{self.metrics_port}/metrics",
                "replicas": list(config.replicas),
                "api_keys": config.api_key_file is not None,
            }
            logger.info("gateway listens", extra={"fields": fields})
            gc.collect()
            gc.freeze()  # what stays for good: looking through it would hold up every stream
            await stop.wait()
            finished = await self.drain.finish(config.drain_timeout)
            logger.info("drained", extra={"fields": {"all_finished": finished}})


def _server(
    app: ASGIApp,
    limits: ConnectionLimits,
    on_refusal: OnRefusal,
    lifespan: "uvicorn.config.LifespanType",
    tls: tuple[Path | None, Path | None] = (None, None),
) -> _Server:
    certificate, key = tls
    return _Server(
        uvicorn.Config(
            app,
            http=http_protocol(limits, on_refusal),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ws="none",
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            backlog=_BACKLOG,
        )
    )


def _admin_app(prometheus: CollectorRegistry, registry: ReplicaRegistry) -> Starlette:
    async def metrics(request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(prometheus), headers={"content-type": content_type})

    watch = Watch(lambda: registry.replicas, prometheus)
    return Starlette(routes=[Route("/metrics", metrics), *ui_routes(watch)])
