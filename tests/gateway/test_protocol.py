"""The public port: what clients may do wrong, half-closed ones, TLS."""

import asyncio
import json
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.server import GatewayServer
from tests.gateway.faulty_replica import (
    DONE,
    FaultyReplica,
    Received,
    answer_captured_chat,
    captured_body,
    event,
)
from tests.gateway.running import (
    CHAT,
    LIMIT,
    Gateway,
    chat,
    eventually,
    gateway_over,
    running_gateway,
)

pytestmark = pytest.mark.anyio


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.server.port)


def wire(body: object, *headers: str, version: str = "1.1") -> bytes:
    text = json.dumps(body).encode()
    lines = [f"POST {CHAT} HTTP/{version}", "host: x", f"content-length: {len(text)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text


def chunked(*headers: str) -> bytes:
    """The head of a chat whose body comes in chunks."""
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", "transfer-encoding: chunked", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(LIMIT):
        return await reader.read()


def error_code(answer: bytes) -> tuple[bytes, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b" ")[1], json.loads(body)["error"]["code"]


async def test_a_head_that_does_not_come_is_408() -> None:
    async with gateway_over(answer_captured_chat, header_timeout=0.2) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        assert error_code(await rest(reader)) == (b"408", "request_timeout")
        writer.close()


async def test_a_head_that_drips_is_408_all_the_same() -> None:
    async with gateway_over(answer_captured_chat, header_timeout=0.3) as (gateway, _):
        reader, writer = await connect(gateway)
        answer = asyncio.create_task(rest(reader))
        writer.write(b"GET /livez HTTP/1.1\r\n")
        while not answer.done():
            writer.write(b"x-a: b\r\n")
            await asyncio.sleep(0.02)
        assert error_code(answer.result()) == (b"408", "request_timeout")
        writer.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_head_over_the_limit_is_431(ends: bool) -> None:
    async with gateway_over(answer_captured_chat, max_header_bytes=4096) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(b"GET /livez HTTP/1.1\r\nx-a: " + b"a" * 5000)
        if ends:
            writer.write(b"\r\n\r\n")
        else:
            await asyncio.sleep(0.05)
            writer.write(b"a" * 5000)
        assert error_code(await rest(reader)) == (b"431", "request_too_large")
        writer.close()


@pytest.mark.parametrize(
    "text",
    [
        *(b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02"),
        *(b"GET /livez HTTP/1.1\r\n\r\n", b"CONNECT / HTTP/1.1\r\nhost: x\r\n\r\n"),
        b"CONNECT a.b:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_400_in_the_envelope(text: bytes) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(text)
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        writer.close()


async def test_requests_in_a_row_on_one_connection() -> None:
    """Two at once (pipelined), then one more: answered in order, each whole."""
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(wire(chat()) + wire(chat(stream=True)))
        first = await reader.readuntil(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 ")
        body = captured_body("chat")
        assert await reader.readexactly(len(body)) == body
        second = await reader.readuntil(b"0\r\n\r\n")
        assert b"transfer-encoding: chunked" in second
        assert b"[DONE]" in second
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        third = await rest(reader)
        assert third.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in third
        writer.close()


@pytest.mark.parametrize("cut", [None, "head", "in the head", "body"])
async def test_a_wish_for_http_2_is_declined_and_the_request_answered(cut: str | None) -> None:
    """As Java's HttpClient asks with every request; the connection goes on in HTTP/1.1."""
    headers = ("connection: Upgrade, HTTP2-Settings, x-hop", "upgrade: h2c", "x-hop: 1")
    text = wire(chat(), *headers, "http2-settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAA")
    end = text.index(b"\r\n\r\n") + 4
    at = {None: len(text), "head": end, "in the head": end - 30, "body": end + 5}[cut]
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        for _ in range(2):
            writer.write(text[:at])
            if cut is not None:
                await asyncio.sleep(0.05)  # a segment of its own
                writer.write(text[at:])
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            body = captured_body("chat")
            assert await reader.readexactly(len(body)) == body
        writer.write(text * 2 + wire(chat(), "connection: close"))
        answers = await rest(reader)
        assert answers.count(b"HTTP/1.1 200 ") == 3
        assert answers.count(b"connection: close") == 1
        sent = [one.json for one in replica.generations]
        assert [{**one, "rid": ""} for one in sent] == [{**chat(), "rid": ""}] * 5
        for name in ("upgrade", "http2-settings", "x-hop", "connection"):
            assert replica.generations[0].header(name) is None
        writer.close()


async def test_a_get_with_a_wish_for_websockets_is_answered() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        wish = b"host: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        writer.write(b"GET /livez HTTP/1.1\r\n" + wish + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_a_body_in_broken_chunks_is_400(together: bool) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(chunked() + b"2\r\n{}\r\n")
        if not together:
            await asyncio.sleep(0.05)
        writer.write(b"what\r\n{}\r\n0\r\n\r\n")
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        writer.close()
        labels = 'code="400",reason="invalid_request_error",route="chat_completions"'
        assert await gateway.metric(f"longleaf_gateway_requests_total{{{labels}}}") == 1


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("status", [b"401", b"413", b"400"])
async def test_a_refusal_reaches_a_client_that_still_sends(
    status: bytes, tls: bool, tmp_path: Path
) -> None:
    """It reads nothing before it has sent all: closing at once would reset it."""
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    settings: dict[str, Any] = {"api_key_file": keys, "max_body_bytes": 1_000_000}
    trust: ssl.SSLContext | None = None
    if tls:
        trust = ssl.create_default_context()
        settings |= tls_files(tmp_path, trust)
    key = "wrong" if status == b"401" else "key"
    head = f"authorization: Bearer {key}"
    if status == b"400":
        text = chunked(head) + b"what\r\n" + b"x" * 5_000_000
    else:
        text = wire(chat(padding="x" * 5_000_000), head)
    async with FaultyReplica() as replica:
        config = GatewayConfig(replicas=(replica.url,), port=0, metrics_port=0, **settings)
        server = GatewayServer(config)
        async with server.running():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trust)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            for start in range(0, len(text), 500_000):
                writer.write(text[start : start + 500_000])
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 " + status)
            assert json.loads(await reader.readuntil(b"}}"))["error"]["message"]
            writer.transport.abort()


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"what is this\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"431"),
        (chunked() + b"what\r\n", b"400"),
    ],
)
async def test_what_came_before_garbage_is_answered_first(garbage: bytes, status: bytes) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(wire(chat()) * 2 + garbage)
        answer, body = await rest(reader), captured_body("chat")
        assert answer.count(body) == 2
        assert answer.rpartition(body)[2].startswith(b"HTTP/1.1 " + status)
        writer.close()


@pytest.mark.parametrize("rest_of_it", [b"", b"GET /livez HT", wire(chat())[:-1]])
async def test_whole_requests_before_the_end_of_input_are_answered(rest_of_it: bytes) -> None:
    """Three sent at once, then perhaps a part of one: as ``nc`` sends what a file holds."""
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        writer.write(wire(chat()) * 3 + rest_of_it)
        writer.write_eof()
        answer = await rest(reader)
        assert answer.count(captured_body("chat")) == 3
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert len(replica.generations) == 3
        assert replica.aborted.empty()
        writer.close()


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_empty_lines_do_not_keep_a_connection(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longleaf.gateway.server._KEEPALIVE_SECONDS", 0.4)
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(before)
        if before:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        ending = asyncio.create_task(rest(reader))
        while not ending.done():
            writer.write(b"\r\n")
            await asyncio.sleep(0.02)
        with suppress(ConnectionResetError):  # a line that came too late to be read
            assert b"HTTP/1.1" not in await ending
        writer.close()


async def test_a_head_is_not_late_while_its_client_is_made_to_wait() -> None:
    """Behind two requests, of which the first takes longer than a head may."""
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await release.wait()
        await request.replay("chat")

    async with gateway_over(behaviour, header_timeout=0.1) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        text = wire(chat())
        writer.write(text * 2 + text[:20])
        await asyncio.sleep(0.05)
        writer.write(text[20:])
        await replica.arrived.get()
        await asyncio.sleep(0.3)
        release.set()
        writer.write_eof()
        assert (await rest(reader)).count(b"HTTP/1.1 200 ") == 3
        writer.close()


async def test_http_1_0_gets_its_answer_unchunked() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(wire(chat(stream=True), version="1.0"))
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == captured_body("chat_stream")
        writer.close()


@pytest.mark.parametrize("wish", ["expect: 100-continue", "Expect: 100-Continue"])
async def test_expect_100_continue(wish: str) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        reader, writer = await connect(gateway)
        head, _, body = wire(chat(), wish).partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closed_its_sending_side_gets_its_answer(stream: bool) -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        if stream:
            await request.start_stream()
            await request.chunk(event("first"))
        await release.wait()
        if stream:
            await request.chunk(event("last") + DONE)
            await request.end_stream()
        else:
            await request.replay("chat")

    async with gateway_over(behaviour) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        writer.write(wire(chat(stream=stream)))
        writer.write_eof()
        await replica.arrived.get()
        await asyncio.sleep(0.4)  # several probes: none of them may hurt
        assert gateway.server.drain.running == 1
        release.set()
        answer = await rest(reader)
        while answer.startswith(b"HTTP/1.1 100 "):
            answer = answer.partition(b"\r\n\r\n")[2]
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert (b'"last"' if stream else captured_body("chat")) in answer
        assert replica.aborted.empty()
        writer.close()


@pytest.mark.parametrize("quick", [True, False])
async def test_http_1_0_and_no_more_input_is_answered_if_it_is_quick(quick: bool) -> None:
    """Whether such a client has left cannot be tested: it is not waited for for long."""

    async def behaviour(request: Received) -> None:
        if quick:
            await request.replay("chat")
        else:
            await request.until_gone()

    async with gateway_over(behaviour) as (gateway, (replica,)):
        reader, writer = await connect(gateway)
        writer.write(wire(chat(), version="1.0"))
        writer.write_eof()
        answer = await rest(reader)
        if quick:
            assert answer.endswith(captured_body("chat"))
        else:
            assert answer == b""
            async with asyncio.timeout(LIMIT):
                await replica.aborted.get()
        writer.close()


async def test_a_client_that_reads_nothing_is_let_go() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        try:
            while True:
                await request.chunk(event("x" * 10_000))
        except ConnectionError:
            request.gone.set()

    async with gateway_over(behaviour, write_timeout=0.3) as (gateway, (replica,)):
        _, writer = await connect(gateway)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(wire(chat(stream=True)))
        received = await replica.arrived.get()
        async with asyncio.timeout(LIMIT):
            assert await replica.aborted.get() == received.json["rid"]
        await eventually(lambda: gateway.server.drain.running == 0)
        writer.transport.abort()


async def test_a_client_that_reads_slowly_is_served_to_the_end() -> None:
    """It takes much longer than the limit, but reads all the time."""
    events = 400

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        for _ in range(events):
            await request.chunk(event("x" * 10_000))
        await request.chunk(DONE)
        await request.end_stream()
        await eventually(lambda: request.writer.transport.get_write_buffer_size() == 0)

    async with gateway_over(behaviour, write_timeout=0.5) as (gateway, _):
        reader, writer = await connect(gateway)
        writer.write(wire(chat(stream=True), "connection: close"))
        got = bytearray()
        while part := await reader.read(100_000):
            got += part
            await asyncio.sleep(0.03)
        assert got.count(b"data: {") == events
        assert got.endswith(b"0\r\n\r\n")
        writer.close()


def tls_files(
    folder: Path, trust: ssl.SSLContext, authority: trustme.CA | None = None
) -> dict[str, Path]:
    """A certificate that ``trust`` will accept, as the settings that name its files."""
    authority = authority or trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / "tls.crt", folder / "tls.key"
    chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    authority.configure_trust(trust)
    return {"tls_certificate_file": chain, "tls_key_file": key}


async def test_tls_by_file(tmp_path: Path) -> None:
    authority, trust = trustme.CA(), ssl.create_default_context()
    chain, key = tls_files(tmp_path, trust, authority).values()
    async with FaultyReplica() as replica:
        config = GatewayConfig(
            replicas=(replica.url,),
            port=0,
            metrics_port=0,
            recovery_interval=0.02,
            key_reload_interval=0.05,
            tls_certificate_file=chain,
            tls_key_file=key,
        )
        server = GatewayServer(config)
        connector = aiohttp.TCPConnector(ssl=trust)
        async with server.running(), aiohttp.ClientSession(connector=connector) as http:
            url = f"https://127.0.0.1:{server.port}"

            async def ready() -> bool:
                async with http.get(url + "/readyz") as response:
                    return response.status == 200

            async with asyncio.timeout(LIMIT):
                while not await ready():  # noqa: ASYNC110 - it lies behind HTTP
                    await asyncio.sleep(0.01)
            async with http.post(url + CHAT, json=chat(stream=True)) as response:
                assert await response.read() == captured_body("chat_stream")
            renewed = authority.issue_cert("127.0.0.1", common_name="renewed")
            key.write_bytes(renewed.private_key_pem.bytes())
            chain.write_bytes(b"".join(pem.bytes() for pem in renewed.cert_chain_pems))

            async def name() -> str:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trust)
                subject = dict(part[0] for part in writer.get_extra_info("peercert")["subject"])
                writer.transport.abort()
                return str(subject.get("commonName"))

            async with asyncio.timeout(LIMIT):
                while await name() != "renewed":  # noqa: ASYNC110 - it lies behind TLS
                    await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(wire(chat()))
            assert not (await rest(reader)).startswith(b"HTTP/")  # no plain text
            writer.close()


@pytest.mark.parametrize("given", ["tls_certificate_file", "tls_key_file"])
def test_certificate_and_key_belong_together(given: str) -> None:
    with pytest.raises(ValueError, match="belong together"):
        GatewayConfig.model_validate({"replicas": ("http://a:1",), given: Path("/x")})


async def test_replicas_that_speak_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    trusted = tmp_path / "ca.crt"
    authority.cert_pem.write_to_path(trusted)
    replica = FaultyReplica()
    replica.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(replica.tls)
    async with replica:
        async with running_gateway(replica.url, ready=1, upstream_ca_file=trusted) as gateway:
            assert (await gateway.raw(chat(stream=True)))[1] == captured_body("chat_stream")
        async with running_gateway(replica.url) as gateway:  # a stranger's certificate
            kind = (
                f'longleaf_gateway_upstream_errors_total{{kind="health",replica="{replica.url}"}}'
            )
            async with asyncio.timeout(LIMIT):
                while await gateway.metric(kind) < 3:  # noqa: ASYNC110 - it lies behind HTTP
                    await asyncio.sleep(0.01)
            assert await gateway.ready() == 0
