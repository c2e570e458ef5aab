"""Puts the gateway together: one FastAPI application over one registry of replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request

from longleaf import __version__
from longleaf.gateway.admission.admission import Admission
from longleaf.gateway.admission.intake import Intake
from longleaf.gateway.admission.limits import KeyLimits
from longleaf.gateway.api import errors
from longleaf.gateway.api.answers import ErrorResponse
from longleaf.gateway.api.front import Front
from longleaf.gateway.api.reception import Reception
from longleaf.gateway.api.relay import Relay
from longleaf.gateway.api.routes import make_direct, make_router
from longleaf.gateway.api.schemas import ChatCompletionRequest, CompletionRequest
from longleaf.gateway.auth import KeyRing, follow_key_file
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.drain import Drain
from longleaf.gateway.prompts.pool import WorkerPool
from longleaf.gateway.prompts.reader import PromptReader
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.routing.policy import Routing
from longleaf.gateway.tracing import Tracing
from longleaf.metrics import GatewayMetrics


def build_app(
    config: GatewayConfig,
    drain: Drain,
    prometheus: CollectorRegistry,
    tracing: Tracing | None = None,
) -> tuple[Front, ReplicaRegistry]:
    """The public application, and its replicas. Its lifespan opens and closes their clients.

    ``tracing``: by default as configured. Raises ``ValueError`` for a key file that cannot be used.
    """
    if tracing is None and config.otlp_endpoint is not None:
        tracing = Tracing.to_endpoint(config.otlp_endpoint)
    keys = None if config.api_key_file is None else KeyRing.load(config.api_key_file)
    metrics = GatewayMetrics(prometheus)
    registry = ReplicaRegistry(config, metrics)
    reader = PromptReader(
        config.tokenizer_paths,
        WorkerPool(
            config.tokenizer_workers,
            config.tokenize_timeout,
            config.tokenizer_queue_size,
            config.tokenizer_queue_bytes,
        ),
        config.tokenize_timeout,
        registry,
        metrics,
    )
    routing = Routing(config.routing, config.prefix_index_bytes)
    admission = Admission(config, registry, routing, metrics)
    registry.changed = admission.changed
    intake = Intake(
        registry, reader, admission, KeyLimits(), metrics, config.assumed_completion_tokens
    )
    reception = Reception(max(config.receive_bytes, config.max_body_bytes), config.queue_timeout)
    relay = Relay(config, registry, intake, drain, metrics, reception)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await registry.start()
        tasks = [asyncio.create_task(reader.check(config.loads_interval))]
        if keys is not None and config.api_key_file is not None:
            interval = config.key_reload_interval
            follow = follow_key_file(keys, config.api_key_file, interval, metrics)
            tasks.append(asyncio.create_task(follow))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await reader.close()
            await registry.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="Longleaf",
        version=__version__,
        summary="Chat completions for long contexts.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(make_router(relay))
    _add_error_handlers(app)
    _add_body_schemas(app, secured=keys is not None)
    return Front(app, keys, drain, metrics, make_direct(relay), tracing), registry


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(errors.ApiError)
    async def api_error(_: Request, error: errors.ApiError) -> ErrorResponse:
        return ErrorResponse(error)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, __: Exception) -> ErrorResponse:
        return ErrorResponse(errors.internal_error())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> ErrorResponse:
        path = request.url.path
        if error.status_code == 404:
            return ErrorResponse(errors.not_found(path))
        if error.status_code == 405:
            headers = error.headers or {}
            return ErrorResponse(errors.method_not_allowed(request.method, path, headers))
        return ErrorResponse(errors.internal_error(error.status_code, str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> ErrorResponse:
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return ErrorResponse(errors.invalid_request(f"{param}: {first['msg']}.", param))


def _add_body_schemas(app: FastAPI, *, secured: bool) -> None:
    """Put the bodies that handlers read themselves into the OpenAPI document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            _, definitions = models_json_schema(
                [
                    (ChatCompletionRequest, "validation"),
                    (CompletionRequest, "validation"),
                ],
                ref_template="#/components/schemas/{model}",
            )
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # never sent: ours are 400
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            if secured:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
