"""What a kept connection to a replica must not carry over to the next request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from longleaf.gateway.api.details import numbers
from longleaf.gateway.replicas.client import ReplicaClient
from tests.gateway.running import LIMIT

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
GHOST = HEAD % 5 + b"ghost"


class Answering:
    """Answers the n-th request of all connections with the n-th bytes."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = iter(answers)
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(next(self.answers))
        except (asyncio.IncompleteReadError, ConnectionError, StopIteration):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def client_of(answering: Answering) -> AsyncIterator[ReplicaClient]:
    server = await asyncio.start_server(answering, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = ReplicaClient(f"http://127.0.0.1:{port}", LIMIT, None)
    try:
        yield client
    finally:
        await client.close()
        server.close()


async def fetched(client: ReplicaClient) -> bytes:
    return (await client.fetch("GET", "/", LIMIT))[1]


async def test_a_connection_is_kept() -> None:
    answering = Answering(HEAD % 3 + b"one", HEAD % 3 + b"two")
    async with client_of(answering) as client:
        assert [await fetched(client) for _ in range(2)] == [b"one", b"two"]
    assert answering.connections == 1


@pytest.mark.parametrize("cut", [1, 12, 30, len(GHOST) - 2, len(GHOST)])
async def test_an_answer_that_nobody_asked_for_reaches_nobody(cut: int) -> None:
    """The beginning of it comes with an answer, the rest would come with the next one."""
    answering = Answering(HEAD % 3 + b"one" + GHOST[:cut], GHOST[cut:] + HEAD % 3 + b"two")
    async with client_of(answering) as client:
        assert await fetched(client) == b"one"
        answering.answers = iter([HEAD % 3 + b"two"])
        assert await fetched(client) == b"two"
    assert answering.connections == 2


async def test_a_connection_whose_reading_is_paused_is_not_kept() -> None:
    """Whoever asked next would hear nothing."""
    long = bytes(200_000)
    answering = Answering(HEAD % len(long) + long, HEAD % 3 + b"two")
    async with client_of(answering) as client, asyncio.timeout(LIMIT):
        connection = await client.begin("GET", "/", [], (b"",))
        while not connection._ended:
            await asyncio.sleep(0.01)
            if connection._read_paused and not connection._ended:
                await connection.read()
        assert connection._read_paused
        client.end(connection)
        assert await fetched(client) == b"two"
    assert answering.connections == 2


@pytest.mark.parametrize("last", [b"null", b'"12"', b"{}", b"-3", b"  7"])
def test_a_figure_s_last_number_counts(last: bytes) -> None:
    end = b'"prompt_tokens": 5, "prompt_tokens":7,"completion_tokens":2,"prompt_tokens":' + last
    assert numbers(end) == {"prompt_tokens": 7.0, "completion_tokens": 2.0}
