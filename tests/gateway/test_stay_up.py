"""What must not bring the gateway down, with processes that really die."""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.faulty_replica import (
    DONE,
    Received,
    answer_captured_chat,
    captured_body,
    event,
)
from tests.gateway.replica_process import ReplicaProcess, chat_of
from tests.gateway.running import CHAT, LIMIT, chat, gateway_over
from tests.gateway.test_process import Process, gateway_process
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio

QUICK = ("--health-interval", "0.2")


def free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in with_ports]
    for one in with_ports:
        one.close()
    return ports


@asynccontextmanager
async def fleet(
    count: int, *arguments: str
) -> AsyncIterator[tuple[str, list[ReplicaProcess], aiohttp.ClientSession, Process]]:
    """A gateway process before that many replica processes: its URL, they, a client."""
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(ReplicaProcess(port)) for port in free_ports(count)
        ]
        others = [part for one in replicas[1:] for part in ("--replica", one.url)]
        process = await stack.enter_async_context(
            gateway_process(replicas[0].url, *others, *QUICK, *arguments)
        )
        reading = asyncio.create_task(process.read_on())  # a full pipe would stop the gateway
        stack.callback(reading.cancel)
        unlimited = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=unlimited))
        url = f"http://127.0.0.1:{process.port}"
        async with asyncio.timeout(LIMIT):
            while await ready(http, url) < count:  # noqa: ASYNC110 - it lies behind HTTP
                await asyncio.sleep(0.02)
        yield url, replicas, http, process


async def ready(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url + "/readyz") as response:
        return int((await response.json()).get("ready_replicas", 0))


@pytest.mark.parametrize("first_ms", [600, 0])
async def test_kill_9_of_a_replica(first_ms: int) -> None:
    """Before its first event another replica takes over; after it the client is told."""
    async with fleet(2, "--routing", "round_robin") as (url, (first, second), http, _):
        wish = chat_of(chunks=40, gap_ms=50, first_ms=first_ms)
        asked = [asyncio.create_task(raw(http, url, wish)) for _ in range(2)]
        await asyncio.sleep(0.4)
        await first.kill()
        answers = sorted([await one for one in asked], key=len)
        whole = answers[1]
        assert whole.endswith(DONE)
        assert whole.count(b"data: {") == 41
        if first_ms:
            assert answers[0] == whole
        else:
            events = answers[0].split(b"\n\n")
            assert error_of(json.loads(events[-2][6:]))["code"] == "stream_interrupted"
            assert 0 < len(events) - 2 < 41
        for _ in range(4):
            assert (await raw(http, url, chat_of(chunks=1))).endswith(DONE)
        await first.start()
        async with asyncio.timeout(LIMIT):
            while await ready(http, url) < 2:  # noqa: ASYNC110 - it lies behind HTTP
                await asyncio.sleep(0.02)
        await second.kill()
        assert (await raw(http, url, chat_of(chunks=1))).endswith(DONE)


async def raw(http: aiohttp.ClientSession, url: str, body: object) -> bytes:
    async with http.post(url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def test_rolling_restart_under_load() -> None:
    """Three replicas die one by one and return: no request fails that had not started."""
    async with fleet(3) as (url, replicas, http, _):
        ending = asyncio.Event()
        outcomes: Counter[str] = Counter()

        async def client(number: int) -> None:
            wish = chat_of(chunks=8, gap_ms=10, first_ms=20 * (number % 3))
            while not ending.is_set():
                body = wish if number % 2 else {**wish, "stream": False}
                async with http.post(url + CHAT, json=body) as response:
                    answer = await response.read()
                if response.status != 200:
                    outcomes[f"{response.status} {answer.decode()}"] += 1
                elif not number % 2 or answer.endswith(DONE):
                    outcomes["whole"] += 1
                else:  # it had started
                    assert answer.startswith(b"data: {")
                    last = json.loads(answer.rpartition(b"data: ")[2])
                    outcomes[str(error_of(last)["code"])] += 1

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        for replica in replicas:
            await asyncio.sleep(0.5)
            await replica.kill()
            await asyncio.sleep(0.5)
            await replica.start()
            async with asyncio.timeout(LIMIT):
                while await ready(http, url) < 3:  # noqa: ASYNC110 - it lies behind HTTP
                    await asyncio.sleep(0.02)
        ending.set()
        await asyncio.gather(*clients)
        assert outcomes["whole"] > 100
        assert set(outcomes) <= {"whole", "stream_interrupted"}


def open_sockets(process: Process) -> int:
    count = 0
    for entry in Path(f"/proc/{process.child.pid}/fd").iterdir():
        with suppress(OSError):
            count += str(entry.readlink()).startswith("socket:")
    return count


def resident_kilobytes(process: Process) -> int:
    text = Path(f"/proc/{process.child.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def wire(body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


STREAM = wire(chat_of(chunks=400, gap_ms=20))
SILENT = wire(chat_of(chunks=1, first_ms=60_000))
POINTS: dict[str, tuple[bytes, Callable[[bytes], bool]]] = {
    "connected": (b"", lambda _: True),
    "in its head": (STREAM[:30], lambda _: True),
    "in its body": (STREAM[:-20], lambda _: True),
    "before the answer": (SILENT, lambda _: True),
    "at the answer's head": (STREAM, lambda got: b"HTTP/1.1 200" in got),
    "in the stream": (STREAM, lambda got: got.count(b"data: ") > 3),
}


async def vanish(port: int, number: int) -> None:
    """Send and read up to a point, then go: in order, with a reset, or half-closed first."""
    sent, arrived = POINTS[list(POINTS)[number % len(POINTS)]]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    got = b""
    async with asyncio.timeout(LIMIT):
        while not arrived(got):
            got += await reader.read(1000)
    await asyncio.sleep(random.random() * 0.05)
    how = number // len(POINTS) % 3
    if how == 0:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    elif how == 1:
        writer.write_eof()
        await asyncio.sleep(0.01)
    writer.transport.abort()


async def test_a_thousand_clients_that_vanish_at_every_point() -> None:
    async with fleet(2) as (url, replicas, http, process):

        async def settled() -> dict[str, float]:
            metrics = str((await process.line("gateway listens"))["metrics"])
            async with http.get(metrics) as response:
                text = await response.text()
            kept = ("in_flight_requests", "reservations", "reserved_tokens", "queue_depth")
            return {
                name: float(value)
                for name, _, value in (
                    line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"
                )
                if any(name.startswith(f"longleaf_gateway_{one}") for one in kept)
            }

        async def batch(start: int) -> None:
            async with asyncio.timeout(60):
                await asyncio.gather(*(vanish(process.port, n) for n in range(start, start + 100)))

        async def back_to_rest() -> None:
            async with asyncio.timeout(LIMIT):
                while any((await settled()).values()):  # noqa: ASYNC110 - it lies behind HTTP
                    await asyncio.sleep(0.05)

        await batch(0)
        await back_to_rest()
        memory = resident_kilobytes(process)
        for start in range(100, 1100, 100):
            await batch(start)
        await back_to_rest()
        assert resident_kilobytes(process) - memory < 20_000
        sockets = open_sockets(process)
        async with asyncio.timeout(LIMIT):
            while sockets > 14:  # two ports, kept connections to two replicas, our own client's
                await asyncio.sleep(0.1)
                sockets = open_sockets(process)
        assert (await raw(http, url, chat_of(chunks=2))).endswith(DONE)
        assert process.child.returncode is None
        assert len(replicas) == 2


async def test_half_a_character_at_a_chunk_border() -> None:
    text = event("漢字かな" * 20, choices=[{"index": 0, "delta": {"content": "漢字"}}])
    text = text.replace(b"\\u6f22\\u5b57", "漢字".encode())

    async def one_byte_each(request: Received) -> None:
        await request.start_stream()
        for index in range(len(text)):
            await request.chunk(text[index : index + 1])
        await request.chunk(DONE)
        await request.end_stream()

    async with gateway_over(one_byte_each) as (gateway, _):
        assert (await gateway.raw(chat(stream=True)))[1] == text + DONE


async def test_an_error_event_in_mid_stream_passes() -> None:
    error = b'data: {"error": {"message": "boom", "code": 500}}\n\n'

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        await request.chunk(error)
        await request.chunk(DONE)
        await request.end_stream()

    async with gateway_over(behaviour, answer_captured_chat) as (gateway, (_, other)):
        assert (await gateway.raw(chat(stream=True)))[1] == event("one") + error + DONE
        assert other.generations == []


async def drip(request: Received) -> None:
    """Bytes all the time, never an event."""
    await request.start_stream()
    with suppress(ConnectionError):
        while True:
            await request.chunk(b"d")
            await asyncio.sleep(0.02)
    request.gone.set()


async def test_a_replica_that_drips_has_its_deadline() -> None:
    async with gateway_over(drip, first_byte_timeout=0.3) as (gateway, (replica,)):
        status, body, _ = await gateway.answer(chat(stream=True))
        assert (status, error_of(body)["code"]) == (504, "upstream_timeout")
        assert await replica.aborted.get() == replica.generations[0].json["rid"]


async def test_a_replica_that_drips_in_mid_stream_is_silent() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        with suppress(ConnectionError):
            while True:
                await request.chunk(b"d")
                await asyncio.sleep(0.02)
        request.gone.set()

    async with gateway_over(behaviour, idle_timeout=0.3) as (gateway, _):
        _, body, _ = await gateway.raw(chat(stream=True))
        assert body.startswith(event("one"))
        assert b"stream_interrupted" in body


async def test_others_are_served_beside_a_drip_and_a_hang() -> None:
    async def hang(request: Received) -> None:
        await request.until_gone()

    async with gateway_over(drip, hang, answer_captured_chat) as (gateway, replicas):
        stuck = [asyncio.create_task(gateway.raw(chat(stream=True))) for _ in range(2)]
        await replicas[0].arrived.get()
        await replicas[1].arrived.get()
        status, body, _ = await gateway.raw(chat(stream=True))
        assert (status, body) == (200, captured_body("chat_stream"))
        assert await gateway.ready() == 3
        for one in stuck:
            one.cancel()
        await asyncio.wait(stuck)


async def test_a_replica_may_reset_at_any_byte() -> None:
    """Whole events or an error, whatever byte it was."""
    answer = b"".join(event(str(number)) for number in range(3)) + DONE

    for cut in range(1, len(answer), 37):

        async def behaviour(request: Received, cut: int = cut) -> None:
            await request.start_stream()
            await request.chunk(answer[:cut])
            request.reset()

        async with gateway_over(behaviour, unhealthy_after=999) as (gateway, _):
            status, body, _ = await gateway.raw(chat(stream=True))
        events = [part for part in body.split(b"\n\n") if part]
        if status == 200:
            assert answer.startswith(body.rpartition(b"data: ")[0])
            assert error_of(json.loads(events[-1][6:]))["code"] == "stream_interrupted"
        else:
            assert (status, error_of(json.loads(body))["code"]) == (503, "service_unavailable")
