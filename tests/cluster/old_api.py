"""Kubernetes 1.20 serves EndpointSlices and evictions as v1beta1, with the fields of v1's.

A proxy that changes the version alone, and relays everything else as it comes: what is under test
talks to the real API server, with its own token.
"""

import asyncio
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NEW, OLD = b"/apis/discovery.k8s.io/v1/", b"/apis/discovery.k8s.io/v1beta1/"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)


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
    # Again: a connection that was just accepted begins one more.
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """One request a connection, so that each is translated."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1])) if length else b""
        if b"/eviction" in first:
            body = body.replace(b'"policy/v1"', b'"policy/v1beta1"')
        rest = _LENGTH.sub(f"\r\nContent-Length: {len(body)}".encode(), b"\r\n" + rest)
        head = first.replace(NEW, OLD, 1) + b"\r\nConnection: close" + rest
        tls = ssl._create_unverified_context()
        upstream, upward = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        try:
            upward.write(head + body)
            while chunk := await upstream.read(65_536):
                writer.write(chunk)
                await writer.drain()
        finally:
            upward.transport.abort()
            with suppress(OSError):
                await upward.wait_closed()
    except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        pass
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
