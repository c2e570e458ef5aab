"""The routes that tell how the server is: they read snapshots and never wait for the engine."""

import uuid
from datetime import UTC, datetime
from typing import Any

import anyio
import numpy as np
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from longleaf import __version__
from longleaf.embedded.engine import EngineDeadError
from longleaf.embedded.recorder import VerifiedTree
from longleaf.embedded.request import GenerationRequest
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.loads import load_body, prometheus_text
from longleaf.embedded.server.service import Service


def status_routes(service: Service) -> APIRouter:
    """Health, models, server and model facts, loads, metrics."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @router.get("/health_generate")
    async def health_generate() -> Response:
        return Response(status_code=200 if await _generates(service) else 503)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != service.loaded.info.name:
            raise ApiError(f"The model '{model}' does not exist", 404, "NotFoundError")
        return _model_card(service)

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        info = service.loaded.info
        return {
            "model_path": info.path,
            "tokenizer_path": info.path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": info.model_type,
            "architectures": list(info.architectures),
        }

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return _server_info(service)

    @router.get("/v1/loads")
    async def loads(include: str | None = None, format: str = "json") -> Response:  # noqa: A002
        load = load_body(service, include)
        if format == "prometheus":
            return PlainTextResponse(prometheus_text(load), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        answer = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "accelerator": None,
            "num_accelerators": 0,
            "loads": [load],
        }
        return JSONResponse(answer)

    @router.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(service.registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @router.get("/longleaf/trees")
    async def trees() -> dict[str, Any]:
        return {"trees": [_tree(service, one) for one in service.trees()]}

    return router


async def _generates(service: Service) -> bool:
    """Whether the engine answers a request of one token in time; a refusal by a full queue is an
    answer.
    """
    if not service.healthy:
        return False
    request = GenerationRequest(
        rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", prompt=np.zeros(1, np.int64), max_tokens=1
    )
    try:
        with anyio.fail_after(service.server.stall_seconds):
            async with service.engine.stream(request) as events:
                await events.next_event()
    except (TimeoutError, EngineDeadError):
        return False
    return service.healthy


def _tree(service: Service, verified: VerifiedTree) -> dict[str, Any]:
    tree = verified.tree
    told = {
        "time": verified.time,
        "context": verified.context,
        "parents": tree.parents.tolist(),
        "log_probs": tree.log_probs.tolist(),
        "path": verified.path,
    }
    if service.server.show_draft_text:
        decode = service.loaded.tokenizer.decode
        told["texts"] = [decode([one], skip_special_tokens=False) for one in tree.tokens.tolist()]
    return told


def _model_card(service: Service) -> dict[str, Any]:
    info = service.loaded.info
    card = {
        "id": info.name,
        "object": "model",
        "created": service.started,
        "owned_by": "longleaf",
        "root": info.name,
        "parent": None,
        "max_model_len": info.context_length,
    }
    return card if service.fingerprint is None else {**card, "simulated": service.fingerprint}


def _server_info(service: Service) -> dict[str, Any]:
    info, limits, spec = service.loaded.info, service.loaded.limits, service.options.speculative
    size = service.loaded.block_size
    block = None if size is None else min(spec.block or size, size)
    told = {} if service.fingerprint is None else {"simulated": service.fingerprint}
    return {
        **told,
        "model_path": info.path,
        "tokenizer_path": info.path,
        "served_model_name": info.name,
        "context_length": info.context_length,
        "max_running_requests": limits.max_running_requests,
        "max_queued_requests": limits.max_queued_requests,
        "max_total_tokens": limits.max_total_tokens,
        "chunked_prefill_size": limits.chunked_prefill_size,
        "schedule_policy": "fcfs",
        "page_size": 1,
        "radix_eviction_policy": "lru",
        "device": "cpu",
        "dtype": "float32",
        "host": service.server.host,
        "port": service.server.port,
        "speculative_algorithm": spec.algorithm.upper() if block is not None else None,
        "speculative_draft_model_path": str(service.options.drafter) if block else None,
        "speculative_num_steps": None if block is None else block - 1,
        "speculative_eagle_topk": None if block is None else spec.topk,
        "speculative_num_draft_tokens": None if block is None else spec.budget + 1,
        "speculative_dflash_block_size": block,
        "speculative_seed_chain": None if block is None else spec.seed_chain,
        "status": "ready" if service.healthy else "unhealthy",
        "max_total_num_tokens": limits.max_total_tokens,
        "max_req_input_len": limits.max_input_len,
        "version": __version__,
    }
