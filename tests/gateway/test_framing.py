"""What of a connection's bytes is a head, a body, a trailer, or too much of them."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.gateway.faulty_replica import answer_captured_chat, captured_body
from tests.gateway.running import CHAT, chat, gateway_over
from tests.gateway.test_protocol import chunked, connect, error_code, rest, wire

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        (b"hello\r\n\r\n", 400, "invalid_request_error"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\n", 408, "request_timeout"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", 431, "request_too_large"),
    ],
)
async def test_what_is_refused_before_it_is_a_request_is_counted(
    text: bytes, code: int, reason: str
) -> None:
    async with gateway_over(answer_captured_chat, header_timeout=0.1) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(text)
        assert (await rest(reader)).startswith(b"HTTP/1.1 %d " % code)
        writer.close()
        labels = f'code="{code}",reason="{reason}",route="other"'
        assert await gateway.metric(f"longleaf_gateway_requests_total{{{labels}}}") == 1


@pytest.mark.parametrize("cut", ["in the line", "in a header", "before the end"])
@pytest.mark.parametrize("before", [b"", wire(chat())])
async def test_a_body_is_no_part_of_its_head_however_it_comes(cut: str, before: bytes) -> None:
    """Long bodies, in one write with the rest of a head that came in two."""
    text = wire(chat(padding="x" * 200_000), "x-a: b")
    end = text.index(b"\r\n\r\n")
    at = {"in the line": 20, "in a header": end - 3, "before the end": end + 2}[cut]
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        writer.write(before + text[:at])
        await writer.drain()
        await asyncio.sleep(0.05)  # a segment of its own
        writer.write(text[at:] + text[:at])
        await asyncio.sleep(0.05)
        writer.write(text[at:])
        writer.write_eof()
        answers = await rest(reader)
        assert answers.count(b"HTTP/1.1 200 ") == 2 + bool(before)
        assert len(replica.generations[-1].json["padding"]) == 200_000
        writer.close()


@pytest.mark.parametrize("text", [b"GET /livez HTTP/1.1\r\nx-a: ", b"GET /livez HTTP/1.1\r\n"])
@pytest.mark.parametrize("more", [b"a" * 1000, b"x-a: " + b"a" * 993 + b"\r\n"])
async def test_a_head_without_end_is_431(text: bytes, more: bytes) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        answer = asyncio.create_task(rest(reader))
        writer.write(text)
        sent = 0
        while not answer.done() and sent < 1_000_000:
            writer.write(more)
            sent += len(more)
            await asyncio.sleep(0)
        assert error_code(await answer) == (b"431", "request_too_large")
        assert sent < 1_000_000
        writer.close()


@pytest.mark.parametrize("where", ["extension", "trailer", "trailers"])
async def test_framing_without_end_is_refused(where: str) -> None:
    """Of a body in chunks: nothing of it is the body, so no limit of bodies would end it."""
    text = json.dumps(chat()).encode()
    whole = b"%x\r\n%b\r\n" % (len(text), text)
    begin, more = {
        "extension": (b"5;x=", b"y" * 1000),
        "trailer": (whole + b"0\r\nx-a: ", b"y" * 1000),
        "trailers": (whole + b"0\r\n", b"x-a: " + b"y" * 993 + b"\r\n"),
    }[where]
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        answer = asyncio.create_task(rest(reader))
        writer.write(chunked() + begin)
        sent = 0
        while not answer.done() and sent < 1_000_000:
            writer.write(more)
            sent += len(more)
            await asyncio.sleep(0)
        head = (await answer).partition(b"\r\n\r\n")[0]
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
        assert sent < 1_000_000
        assert not replica.generations
        writer.close()


async def test_trailers_are_no_headers(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    text = json.dumps(chat()).encode()
    body = b"%x\r\n%b\r\n0\r\n" % (len(text), text)
    late = (
        b"X-Request-Id: late\r\nx-longleaf-details: true\r\nX-Late: 1\r\nHost: y\r\n"
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n"
    )
    async with gateway_over(answer_captured_chat, api_key_file=keys) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        writer.write(chunked("authorization: Bearer key") + body + late)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"late" not in head
        assert await reader.readexactly(len(captured_body("chat"))) == captured_body("chat")
        received = replica.generations[0]
        for name in ("x-late", "traceparent"):
            assert received.header(name) is None
        assert "return_spec_tokens_details" not in received.json
        writer.write(chunked() + body + b"Authorization: Bearer key\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
        writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        (b"host: x", b"Host: y"),
        (b"host: x", b"Transfer-Encoding: gzip, chunked"),
        (b"host: x", b"transfer-encoding: gzip", b"transfer-encoding: chunked"),
        (b"host: x", b"transfer-encoding: identity"),
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(headers: tuple[bytes, ...]) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        lines = (f"POST {CHAT} HTTP/1.1".encode(), *headers, b"", b"0", b"", b"")
        writer.write(b"\r\n".join(lines))
        assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")
        assert not replica.generations
        writer.close()
