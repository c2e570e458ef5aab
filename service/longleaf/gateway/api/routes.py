"""The public routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from longleaf.gateway.api import errors
from longleaf.gateway.api.admission import AdmissionAnswer, dry_answer
from longleaf.gateway.api.answers import ErrorResponse, headers_upstream
from longleaf.gateway.api.body import read_body
from longleaf.gateway.api.details import wanted
from longleaf.gateway.api.reception import Place, ReceptionFullError
from longleaf.gateway.api.refusals import REFUSALS, refusal
from longleaf.gateway.api.relay import Call, Relay, RelayResponse
from longleaf.gateway.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorEnvelope,
    GenerationRequest,
    Health,
    ModelCard,
    ModelList,
)
from longleaf.gateway.prompts.inspection import Route
from longleaf.gateway.prompts.reader import Prompt
from longleaf.gateway.request_log import RequestRecord

_ERRORS: Mapping[int, str] = {
    400: "Malformed body or wrong parameter; `context_length_exceeded` if it can never fit.",
    401: "No API key, or a wrong one.",
    404: "Unknown model.",
    408: "The client stopped sending its body.",
    413: "The body is over the byte limit.",
    429: "Every replica is full; `Retry-After` tells when to come back.",
    500: "The gateway or the replica failed.",
    502: "The replica gave no valid answer.",
    503: "No replica is ready; `Retry-After` tells when to come back.",
    504: "The replica stayed silent too long.",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorEnvelope, "description": _ERRORS[status]} for status in statuses}


def _body(*schemas: type[GenerationRequest]) -> dict[str, Any]:
    """OpenAPI of a body that the handler reads itself: one of ``schemas``."""
    references = [{"$ref": f"#/components/schemas/{schema.__name__}"} for schema in schemas]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _generation(schema: type[GenerationRequest], what: str) -> dict[str, Any]:
    """OpenAPI of a route that generates."""
    return {
        **_body(schema),
        "responses": {
            "200": {
                "description": f"The {what}, or its chunks as server-sent events if `stream`.",
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {},
                },
            }
        },
    }


@dataclass(frozen=True, slots=True)
class Generate:
    """A route that generates, as an ASGI application of its own.

    FastAPI's way to an endpoint costs as much as all that is done there: requests that generate
    take this one. The route's declaration stays FastAPI's.
    """

    relay: Relay
    route: Route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            response: Response = await self.respond(scope, receive)
        except errors.ApiError as error:
            response = ErrorResponse(error)
        await response(scope, receive, send)

    async def respond(self, scope: Scope, receive: Receive) -> Response:
        """Read the body; the answer is yet to run. ``ApiError``."""
        prompt = await _read(self.relay, self.route, scope, receive)
        record: RequestRecord = scope["longleaf.record"]
        headers = headers_upstream(scope["headers"], record.request_id)
        details = wanted(scope["headers"])
        call = Call(scope["path"], prompt, headers, record, scope["longleaf.key"], details)
        return RelayResponse(self.relay, call)


async def _read(relay: Relay, route: Route, scope: Scope, receive: Receive) -> Prompt:
    record: RequestRecord = scope["longleaf.record"]
    config = relay.config
    place = Place(relay.reception)
    try:
        text = await read_body(scope, receive, config, place)
        record.body_bytes = len(text)
        prompt = await relay.intake.reader.read(text, route)
    except ReceptionFullError:
        raise errors.reception_full(config.queue_timeout) from None
    except REFUSALS as error:
        raise refusal(error, "", config.health_interval) from None
    finally:
        place.give_back()
    record.stream = prompt.inspection.stream
    record.model = prompt.inspection.model[:200]
    return prompt


def make_direct(relay: Relay) -> Mapping[str, ASGIApp]:
    """What answers a POST to a path that generates."""
    return {
        "/v1/chat/completions": Generate(relay, "chat_completions"),
        "/v1/completions": Generate(relay, "completions"),
    }


def make_router(relay: Relay) -> APIRouter:
    """The routes over one ``Relay``."""
    router = APIRouter(redirect_slashes=False)

    all_errors = _errors(400, 401, 404, 408, 413, 429, 500, 502, 503, 504)

    @router.post(
        "/v1/chat/completions",
        summary="Chat completion",
        response_class=Response,
        responses=all_errors,
        openapi_extra=_generation(ChatCompletionRequest, "chat completion"),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat. Fields that are not listed go to the engine untouched."""
        return await Generate(relay, "chat_completions").respond(request.scope, request.receive)

    @router.post(
        "/v1/completions",
        summary="Completion",
        response_class=Response,
        responses=all_errors,
        openapi_extra=_generation(CompletionRequest, "completion"),
    )
    async def completions(request: Request) -> Response:
        """Continue a prompt. Fields that are not listed go to the engine untouched."""
        return await Generate(relay, "completions").respond(request.scope, request.receive)

    @router.post(
        "/v1/admission",
        summary="Would it be admitted?",
        responses=_errors(400, 401, 408, 413, 429, 503),
        openapi_extra=_body(ChatCompletionRequest, CompletionRequest),
    )
    async def admission(request: Request) -> AdmissionAnswer:
        """Say what would happen to a chat completion or completion now. Runs nothing."""
        prompt = await _read(relay, "admission", request.scope, request.receive)
        return await dry_answer(relay.intake, prompt, request.scope["longleaf.key"], relay.config)

    @router.get("/v1/models", summary="Models", responses=_errors(401, 503))
    async def models() -> ModelList:
        """The models that the ready replicas serve."""
        if not relay.registry.ready():
            raise relay.no_replica()
        cards = relay.registry.model_cards()
        return ModelList(data=[ModelCard.model_validate(card) for card in cards])

    @router.get("/v1/models/{model:path}", summary="One model", responses=_errors(401, 404, 503))
    async def model(model: str) -> ModelCard:
        """One served model."""
        if not relay.registry.ready():
            raise relay.no_replica()
        for card in relay.registry.model_cards():
            if card["id"] == model:
                return ModelCard.model_validate(card)
        raise errors.model_not_found(model)

    @router.head("/livez", include_in_schema=False)
    @router.get("/livez", summary="Liveness")
    async def livez() -> Health:
        """200 as long as the process answers at all."""
        return Health(status="live", ready_replicas=len(relay.registry.ready()))

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", summary="Readiness", responses=_errors(503))
    async def readyz() -> Health:
        """200 while at least one replica is ready and the gateway is not draining."""
        if relay.drain.draining:
            raise errors.service_unavailable("The gateway is shutting down.", 1.0)
        ready = relay.registry.ready()
        if not ready:
            raise relay.no_replica()
        return Health(status="ready", ready_replicas=len(ready))

    return router
