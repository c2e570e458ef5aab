"""What many clients together may make the gateway hold, as a process."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.faulty_replica import FaultyReplica, Received, event
from tests.gateway.running import chat, eventually
from tests.gateway.test_process import Process, gateway_process
from tests.gateway.test_protocol import wire

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
