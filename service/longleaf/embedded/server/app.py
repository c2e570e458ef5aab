"""The FastAPI application."""

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect

from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.generate import generation_routes
from longleaf.embedded.server.service import Service
from longleaf.embedded.server.status import status_routes

logger = logging.getLogger(__name__)


def build_app(service: Service) -> FastAPI:
    """All routes, and errors in SGLang's shape."""
    app = FastAPI(title="Longleaf embedded engine", openapi_url=None)
    app.include_router(generation_routes(service))
    app.include_router(status_routes(service))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _internal_error)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = "\n".join(f"  {detail}" for detail in error.errors())
    return ApiError(
        f"{len(error.errors())} validation error:\n{details}", 400, "Bad Request"
    ).response()


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(f"Internal server error: {error}", 500, "InternalServerError").response()
