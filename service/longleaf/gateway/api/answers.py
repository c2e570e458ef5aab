"""Error answers over ASGI, and the headers that pass through the gateway."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longleaf.gateway.api.errors import ApiError

_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "trailers", "transfer-encoding", "upgrade"),
}
_NOT_UPSTREAM = {
    name.encode()
    for name in _HOP_BY_HOP
    | {
        *("host", "content-length", "content-type", "expect", "accept-encoding"),
        *("authorization", "x-api-key", "cookie", "x-request-id", "x-longleaf-details"),
    }
}
_NOT_DOWNSTREAM = {
    name.encode()
    for name in _HOP_BY_HOP
    | {"content-length", "date", "server", "set-cookie", "x-request-id", "x-accel-buffering"}
}

RawHeaders = list[tuple[bytes, bytes]]


class ErrorResponse(Response):
    """An ``ApiError`` as an answer."""

    media_type = "application/json"

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, dict(error.headers))
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        record = scope.get("longleaf.record")
        if record is not None:
            record.reason = self.error.reason
        await super().__call__(scope, receive, send)


def headers_upstream(headers: RawHeaders, request_id: str) -> RawHeaders:
    """The client's headers for the replica: end to end ones only, and never its key. Names are in
    lower case.
    """
    passed = [header for header in headers if header[0] not in _NOT_UPSTREAM]
    named = [value for name, value in headers if name == b"connection"]
    if named:
        dropped = {token.strip().lower() for value in named for token in value.split(b",")}
        passed = [header for header in passed if header[0] not in dropped]
    own = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    return passed + own


def headers_downstream(headers: RawHeaders) -> RawHeaders:
    """The replica's headers for the client: end to end ones only."""
    return [(name, value) for name, value in headers if name not in _NOT_DOWNSTREAM]
