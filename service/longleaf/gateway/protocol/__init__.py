"""The public port's HTTP/1.1: what a client may do wrong ends its connection, nobody else's.

An asyncio protocol that runs an ASGI application, in the place of uvicorn's own. Beyond that it
has limits (a head must come in time and in size; who reads nothing is let go), answers in our
envelope, and answers clients that have closed their sending side only.

    reader      bytes in: heads, bodies, what is no HTTP
    request     one request: the application's ``receive`` and ``send``
    response    the head of an answer
    connection  one client: its requests in order, their answers, the end
    timers      what ends a connection that does nothing
"""

from longleaf.gateway.protocol.connection import ConnectionLimits, OnRefusal, http_protocol

__all__ = ["ConnectionLimits", "OnRefusal", "http_protocol"]
