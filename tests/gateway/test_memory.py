"""What many clients together may make the gateway hold, as a process."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from longleaf.gateway.api.reception import Place, Reception, ReceptionFullError
from tests.gateway.faulty_replica import FaultyReplica, Received, answer_captured_chat, event
from tests.gateway.running import CHAT, LIMIT, chat, eventually, gateway_over
from tests.gateway.test_process import Process, gateway_process
from tests.gateway.test_protocol import chunked, connect, error_code, rest, wire

pytestmark = pytest.mark.anyio


def resident_mb(process: Process) -> float:
    pages = int(Path(f"/proc/{process.child.pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def test_a_client_that_reads_nothing_costs_little_memory() -> None:
    """Its replica is made to wait, and a long stream is no reason to keep much of it."""
    count = 30

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        while True:
            await request.chunk(event("x" * 2_000))

    async with FaultyReplica(behaviour) as replica, gateway_process(replica.url) as process:
        reading = asyncio.create_task(process.read_on())
        before = resident_mb(process)
        writers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(wire(chat(stream=True)))
            writers.append((reader, writer))

        def all_wait() -> bool:
            sizes = [one.writer.transport.get_write_buffer_size() for one in replica.generations]
            return len(sizes) == count and min(sizes) > 0

        await eventually(all_wait)
        assert (resident_mb(process) - before) / count < 0.75
        for _, writer in writers:
            writer.transport.abort()
        reading.cancel()


LONG = 4_000_000


def long_body(in_chunks: bool) -> tuple[bytes, bytes]:
    """A long request but for its end, and that."""
    if not in_chunks:
        text = wire(chat(padding="x" * LONG), "connection: close")
        return text[:-1000], text[-1000:]
    text = json.dumps(chat(padding="x" * LONG)).encode()
    text = b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    return chunked("connection: close") + text[:-1000], text[-1000:]


async def until_all_came(process: Process, count: int) -> None:
    listens = await process.line("gateway listens")
    line = f'longleaf_gateway_in_flight_requests{{route="chat_completions"}} {count}.0'
    async with aiohttp.ClientSession() as http, asyncio.timeout(LIMIT):
        while True:
            async with http.get(str(listens["metrics"])) as response:
                if line in await response.text():
                    return
            await asyncio.sleep(0.05)


async def test_bodies_that_are_received_together_are_bounded() -> None:
    """Twenty of 4 MB of which 10 MB may come: they are read two at a time."""
    settings = ("--max-body-bytes", "5000000", "--body-timeout", "20")
    async with (
        FaultyReplica() as replica,
        gateway_process(
            replica.url, *settings, environment={"LONGLEAF_GATEWAY_RECEIVE_BYTES": "10000000"}
        ) as process,
    ):
        reading = asyncio.create_task(process.read_on())
        before = resident_mb(process)
        clients = []
        for number in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            begin, end = long_body(in_chunks=number % 2 > 0)
            writer.write(begin)
            clients.append((reader, writer, end))

        await until_all_came(process, len(clients))
        grown = 0.0
        while resident_mb(process) - before > grown:
            grown = resident_mb(process) - before
            await asyncio.sleep(0.5)
        assert grown < 30  # and not 80
        for _, writer, end in clients:
            writer.write(end)
        for reader, writer, _ in clients:
            assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")
            writer.close()
        assert len(replica.generations) == 20
        reading.cancel()


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_long_body_that_gets_no_place_is_429_and_short_ones_pass(in_chunks: bool) -> None:
    settings = {"receive_bytes": 5_000_000, "max_body_bytes": 5_000_000, "queue_timeout": 0.3}
    async with gateway_over(answer_captured_chat, **settings) as (gateway, _):
        begin, end = long_body(in_chunks)
        reader, writer = await connect(gateway)
        writer.write(begin)
        await writer.drain()
        await eventually(lambda: gateway.server.drain.running == 1)
        late_reader, late_writer = await connect(gateway)
        late_writer.write(b"".join(long_body(in_chunks)))
        assert (await gateway.raw(chat(padding="x" * 100_000), CHAT))[0] == 200
        answer = await rest(late_reader)
        assert error_code(answer) == (b"429", "rate_limit_exceeded")
        assert b"retry-after: 1\r\n" in answer
        writer.write(end)
        assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")
        third_reader, third_writer = await connect(gateway)
        third_writer.write(b"".join(long_body(in_chunks)))
        assert (await rest(third_reader)).startswith(b"HTTP/1.1 200 ")
        for one in (writer, late_writer, third_writer):
            one.close()


async def test_places_go_in_turn_and_come_back_whoever_leaves() -> None:
    reception = Reception(10, 0.05)
    first, second = Place(reception), Place(reception)
    await first.take(6)
    waiting = asyncio.create_task(second.take(6))
    third = asyncio.create_task(reception.take(1))
    await asyncio.sleep(0)
    assert not third.done()  # it would fit, but comes later
    waiting.cancel()
    await third
    with pytest.raises(ReceptionFullError):
        await reception.take(4)
    first.give_back()
    first.give_back()
    second.give_back()
    await reception.take(9)
    with pytest.raises(ReceptionFullError):
        await reception.take(1)
    both = [asyncio.create_task(reception.take(5)) for _ in range(2)]
    await asyncio.sleep(0)
    both[0].cancel()  # and its turn comes in the same moment
    reception.free(9)
    await both[1]
    await reception.take(4)
