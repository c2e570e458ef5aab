"""A replica that costs next to nothing, to measure what stands before it.

It answers SGLang's routes that gateways ask, and generation requests as their text tells:
``[chunks=200 gap_ms=10 first_ms=0]`` in a message. Run it with the ports to listen on:

    python -m ops.bench.gateway_backend 9001 9002
"""

import asyncio
import json
import re
import sys
from typing import cast

import httptools
import uvloop

MODEL = "bench"
CONTEXT_LENGTH = 262_144
POOL_TOKENS = 20_000_000
CHUNK_BYTES = 250

_WISH = re.compile(rb"\[((?:[a-z_]+=\d+ ?)+)\]")
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _json(status: bytes, value: object) -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(content: str, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    value = {"id": "bench", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**value, "choices": [choice]}).encode() + b"\n\n"


_TEXT_BYTES = CHUNK_BYTES - len(_event("", None))
_EVENTS = [_chunk(_event(letter * _TEXT_BYTES, None)) for letter in "xy"]
"""In turn: LiteLLM ends a stream that repeats a chunk a hundred times."""
_END = _chunk(_event("", "stop")) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_USAGE = {"prompt_tokens": 200, "completion_tokens": 200, "total_tokens": 400}
_WHOLE = _json(
    b"200 OK",
    {
        "id": "bench",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "x" * 400},
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    },
)
_CARD = {"id": MODEL, "object": "model", "created": 1, "owned_by": "sglang", "root": MODEL}
_LOAD = {
    "dp_rank": 0,
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_used_tokens": 0,
    "max_total_num_tokens": POOL_TOKENS,
    "max_running_requests": 4096,
}
_INFO = {
    "max_total_num_tokens": POOL_TOKENS,
    "max_req_input_len": CONTEXT_LENGTH,
    "context_length": CONTEXT_LENGTH,
    "max_running_requests": 4096,
    "model_path": MODEL,
    "served_model_name": MODEL,
    "tokenizer_path": "",
    "version": "0.5.17",
}
_ANSWERS = {
    b"/health": _json(b"200 OK", {}),
    b"/health_generate": _json(b"200 OK", {}),
    b"/v1/models": _json(
        b"200 OK", {"object": "list", "data": [{**_CARD, "max_model_len": CONTEXT_LENGTH}]}
    ),
    b"/server_info": _json(b"200 OK", _INFO),
    b"/get_server_info": _json(b"200 OK", _INFO),
    b"/model_info": _json(b"200 OK", _INFO),
    b"/get_model_info": _json(b"200 OK", _INFO),
    b"/v1/loads": _json(b"200 OK", {"loads": [_LOAD]}),
    b"/get_load": _json(b"200 OK", [_LOAD]),
    b"/abort_request": _json(b"200 OK", {}),
}
_GENERATES = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/generate"})


class Backend(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._left = 0
        self._gap = self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """It went."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._body = []

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._url = url

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        path = self._url.partition(b"?")[0]
        if path in _GENERATES:
            self._generate(b"".join(self._body))
        else:
            self._write(_ANSWERS.get(path, _json(b"404 Not Found", {"detail": "Not Found"})))

    def _generate(self, body: bytes) -> None:
        found = _WISH.search(body)
        wishes = dict(pair.split(b"=") for pair in found.group(1).split()) if found else {}
        if not _STREAM.search(body):
            self._write(_WHOLE)
            return
        self._left = int(wishes.get(b"chunks", b"20"))
        self._gap = int(wishes.get(b"gap_ms", b"0")) / 1e3
        self._due = self._loop.time() + int(wishes.get(b"first_ms", b"0")) / 1e3
        self._write(_HEAD)
        self._step()

    def _step(self) -> None:
        now = self._loop.time()
        while self._left and self._due <= now:
            self._write(_EVENTS[self._left % 2])
            self._left -= 1
            self._due += self._gap
        if self._left:
            self._timer = self._loop.call_at(self._due, self._step)
        else:
            self._write(_END)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def main(ports: list[int]) -> None:
    """Listen for ever."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Backend, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
