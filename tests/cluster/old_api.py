"""Kubernetes 1.20 serves EndpointSlices as v1beta1, whose fields that the gateway reads are v1's.

A proxy that changes the path alone, and relays everything else as it comes: what is under test
talks to the real API server, with its own token.
"""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NEW, OLD = b"/apis/discovery.k8s.io/v1/", b"/apis/discovery.k8s.io/v1beta1/"


@contextmanager
def translated(port: int) -> Iterator[str]:
    """Base URL of the API server at a port of the loopback, as one of 1.21 and newer."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(lambda reader, writer: _relay(reader, writer, port), "127.0.0.1", 0)
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(timeout=20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """One request a connection, so that each is translated."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        head = first.replace(NEW, OLD, 1) + b"\r\nConnection: close\r\n" + rest
        tls = ssl._create_unverified_context()
        upstream, upward = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        try:
            upward.write(head)
            while chunk := await upstream.read(65_536):
                writer.write(chunk)
                await writer.drain()
        finally:
            upward.close()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
