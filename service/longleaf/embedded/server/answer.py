"""The ASGI answer to a generation request: whole or streamed, and over as soon as the client is."""

import asyncio
import json

from fastapi import Response
from starlette.types import Receive, Scope, Send

from longleaf.embedded.engine import EngineDeadError, GenerationStream
from longleaf.embedded.request import FinishKind, GenerationRequest, StepEvent
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.render import DONE, Renderer
from longleaf.embedded.server.service import ServedEngine

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class GenerationResponse(Response):
    """Runs a request while it is being answered.

    Nothing is sent before the engine's first event, as SGLang does: refusals that need no stream
    get their status. The connection is watched from the start; when the client leaves, before the
    first token or after, the request is cancelled.
    """

    def __init__(
        self, engine: ServedEngine, request: GenerationRequest, renderer: Renderer, stream: bool
    ) -> None:
        super().__init__()
        self._engine = engine
        self._request = request
        self._renderer = renderer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the ASGI server."""
        try:
            events = self._engine.stream(self._request)
        except EngineDeadError as error:
            await ApiError(str(error), 503).response()(scope, receive, send)
            return
        async with events:
            answer = asyncio.create_task(self._answer(events, scope, receive, send))
            gone = asyncio.create_task(_client_gone(receive))
            try:
                await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                if not answer.done():
                    answer.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await asyncio.wait({answer})
            if not answer.cancelled():
                answer.result()

    async def _answer(
        self, events: GenerationStream, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._stream:
            await self._send_stream(events, send)
            return
        event = await events.collect()
        error = _error(event)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        content = json.dumps(
            self._renderer.whole(event), ensure_ascii=False, separators=(",", ":")
        ).encode()
        await Response(content, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, events: GenerationStream, send: Send) -> None:
        begun = False
        async for event in events:
            error = _error(event)
            payload = error.event() if error else b"".join(self._renderer.chunks(event))
            if not begun:
                begun = True
                await send(
                    {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
                )
            if event.finish is not None:
                payload += DONE
            await send({"type": "http.response.body", "body": payload, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _error(event: StepEvent) -> ApiError | None:
    finish = event.finish
    if finish is None or finish.kind is not FinishKind.ERROR:
        return None
    return ApiError(finish.message, finish.status)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
