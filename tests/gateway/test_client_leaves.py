"""A client that leaves stops its replica, wherever the answer had come to."""

import asyncio
import contextlib
import json
from collections import Counter

import pytest

from tests.gateway.faulty_replica import DONE, Behaviour, FaultyReplica, Received, event
from tests.gateway.running import LIMIT, Gateway, chat, eventually, gateway_over

pytestmark = pytest.mark.anyio

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
CLIENT_LEFT = (
    'longleaf_gateway_requests_total{code="499",reason="client_left",route="chat_completions"}'
)


async def never_answer(request: Received) -> None:
    await request.until_gone()


async def answer_one_event(request: Received) -> None:
    await request.start_stream()
    await request.chunk(event("first"))
    await request.until_gone()


async def send_without_end(request: Received) -> None:
    await request.start_stream()
    with contextlib.suppress(ConnectionError):
        while True:
            await request.chunk(event("more"))
            await asyncio.sleep(0)
    request.gone.set()


async def half_a_body(request: Received) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    await request.until_gone()


class Client:
    """A raw client that can vanish in every way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def send(cls, gateway: Gateway, **fields: object) -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        body = json.dumps(chat(**fields)).encode()
        writer.write(HEAD % len(body) + body)
        await writer.drain()
        return cls(reader, writer)

    async def vanish(self, how: str) -> None:
        """Close in order (FIN) or reset (RST)."""
        if how == "reset":
            self._writer.transport.abort()
        else:
            self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def assert_stopped(gateway: Gateway, replica: FaultyReplica, received: Received) -> None:
    """The replica sees its connection closed and is told to abort the very request."""
    async with asyncio.timeout(LIMIT):
        await received.gone.wait()
        assert await replica.aborted.get() == received.json["rid"]
    await eventually(lambda: gateway.server.drain.running == 0)
    assert await gateway.metric(CLIENT_LEFT) == 1


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_before_the_first_token_stops_the_replica(
    stream: bool, how: str
) -> None:
    async with gateway_over(never_answer) as (gateway, (replica,)):
        client = await Client.send(gateway, stream=stream)
        received = await replica.arrived.get()
        await client.vanish(how)
        await assert_stopped(gateway, replica, received)
        assert await gateway.metric('longleaf_gateway_aborts_total{when="before_first_event"}') == 1


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("behaviour", [answer_one_event, send_without_end])
async def test_client_that_leaves_after_the_first_token_stops_the_replica(
    behaviour: Behaviour, how: str
) -> None:
    async with gateway_over(behaviour) as (gateway, (replica,)):
        client = await Client.send(gateway, stream=True)
        received = await replica.arrived.get()
        await client.reader.readuntil(b"\n\n")
        await client.vanish(how)
        await assert_stopped(gateway, replica, received)
        assert await gateway.metric('longleaf_gateway_aborts_total{when="after_first_event"}') == 1


async def test_client_that_leaves_in_the_middle_of_a_whole_answer_stops_the_replica() -> None:
    async with gateway_over(half_a_body) as (gateway, (replica,)):
        client = await Client.send(gateway)
        received = await replica.arrived.get()
        await client.vanish("close")
        await assert_stopped(gateway, replica, received)


async def test_client_that_stops_reading_and_leaves_stops_the_replica() -> None:
    """Even when the gateway is blocked writing to it."""
    async with gateway_over(send_without_end) as (gateway, (replica,)):
        client = await Client.send(gateway, stream=True)
        received = await replica.arrived.get()
        transport = received.writer.transport
        await eventually(lambda: transport.get_write_buffer_size() > 0)  # back-pressure, end to end
        await client.vanish("reset")
        await assert_stopped(gateway, replica, received)


async def test_client_that_leaves_while_it_sends_its_body_is_no_error() -> None:
    async with gateway_over(never_answer) as (gateway, (replica,)):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(HEAD % 99 + b"{")
        await writer.drain()
        await eventually(lambda: gateway.server.drain.running == 1)
        client = Client(reader, writer)
        await client.vanish("close")
        await eventually(lambda: gateway.server.drain.running == 0)
        assert replica.generations == []
        assert await gateway.metric(CLIENT_LEFT) == 1


async def test_answer_read_to_its_end_is_not_aborted() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event() + DONE)
        await request.end_stream()

    async with gateway_over(behaviour) as (gateway, (replica,)):
        assert (await gateway.raw(chat(stream=True)))[0] == 200
        await eventually(lambda: gateway.server.drain.running == 0)
    assert replica.aborted.empty()


def gateway_tasks() -> Counter[str]:
    """Tasks of this loop by name of their coroutine, but for the replicas' own."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return Counter(name for name in names if not name.startswith(FaultyReplica.__name__))


async def test_many_clients_that_vanish_leave_nothing_behind() -> None:
    async with gateway_over(answer_one_event, never_answer) as (gateway, replicas):
        before = gateway_tasks()
        clients = [await Client.send(gateway, stream=bool(number % 3)) for number in range(60)]
        received = [await replica.arrived.get() for replica in replicas for _ in range(30)]
        for number, client in enumerate(clients):
            await client.vanish("reset" if number % 2 else "close")
        aborted = {await replica.aborted.get() for replica in replicas for _ in range(30)}
        assert aborted == {request.json["rid"] for request in received}
        await eventually(lambda: gateway.server.drain.running == 0)
        in_flight = 'longleaf_gateway_in_flight_requests{route="chat_completions"}'
        assert await gateway.metric(in_flight) == 0
        await eventually(lambda: gateway_tasks() == before)
