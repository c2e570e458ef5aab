"""Errors that clients see: one constructor per kind, one envelope for all.

The envelope is OpenAI's, ``{"error": {"message", "type", "param", "code"}}``, as a JSON answer or,
once a stream has started, as an SSE event.
"""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_FINAL = MappingProxyType({"x-should-retry": "false"})
MAX_RETRY_AFTER_SECONDS = 120
"""Clients ignore a longer ``Retry-After``."""
_SHOWN_MODEL = 100
_FULL = "All replicas are saturated; their request queues are full. Retry later."


class ApiError(Exception):
    """An answer that is an error: HTTP status, envelope and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def reason(self) -> str:
        """Short name for metrics and logs, from a closed set."""
        return self.code or self.kind

    def body(self) -> bytes:
        """The envelope as JSON."""
        fields = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": fields}).encode()

    def event(self) -> bytes:
        """The envelope as one SSE event."""
        return b"data: " + self.body() + b"\n\n"


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER_SECONDS))}


def invalid_request(message: str, param: str | None) -> ApiError:
    """400: the body is malformed or a parameter is wrong."""
    return ApiError(400, message, "invalid_request_error", param=param)


def context_length_exceeded(message: str, param: str) -> ApiError:
    """400: the request can never fit, so a retry is pointless."""
    return ApiError(
        400,
        message,
        "invalid_request_error",
        code="context_length_exceeded",
        param=param,
        headers=_FINAL,
    )


def invalid_api_key() -> ApiError:
    """401: no key, or one that is not accepted."""
    message = "Incorrect or missing API key. Send it as 'Authorization: Bearer <key>'."
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, "invalid_request_error", code="invalid_api_key", headers=headers)


def not_found(path: str) -> ApiError:
    """404: no such route."""
    message = f"No such path: {path}"
    return ApiError(404, message, "invalid_request_error", code="not_found")


def model_not_found(model: str) -> ApiError:
    """404: no replica serves the model."""
    shown = model if len(model) <= _SHOWN_MODEL else model[:_SHOWN_MODEL] + "…"
    message = f"The model {shown!r} does not exist."
    return ApiError(404, message, "invalid_request_error", code="model_not_found", param="model")


def method_not_allowed(method: str, path: str, headers: Mapping[str, str]) -> ApiError:
    """405: the route exists, the method does not."""
    message = f"{path} does not take {method}."
    return ApiError(
        405, message, "invalid_request_error", code="method_not_allowed", headers=headers
    )


def body_too_large(limit: int) -> ApiError:
    """413: the body is over the byte limit. The connection ends: the rest is not read."""
    message = f"The request body is larger than the limit of {limit} bytes."
    headers = {"connection": "close"}
    return ApiError(
        413, message, "invalid_request_error", code="request_too_large", headers=headers
    )


def body_stalled(seconds: float) -> ApiError:
    """408: the client stopped sending its body. The connection ends with the answer."""
    message = f"Nothing of the request body came for {seconds:g} s."
    headers = {"connection": "close"}
    return ApiError(408, message, "invalid_request_error", code="request_timeout", headers=headers)


def body_too_slow(rate: int) -> ApiError:
    """408: the body comes too slowly. The connection ends with the answer."""
    message = f"The request body came slower than {rate} bytes a second."
    headers = {"connection": "close"}
    return ApiError(408, message, "invalid_request_error", code="request_timeout", headers=headers)


def head_stalled(seconds: float) -> ApiError:
    """408: the request's head did not come in time."""
    message = f"The request's head was not complete after {seconds:g} s."
    return ApiError(408, message, "invalid_request_error", code="request_timeout")


def head_too_large(limit: int) -> ApiError:
    """431: the request's head is over the byte limit."""
    message = f"The request's head is larger than the limit of {limit} bytes."
    return ApiError(431, message, "invalid_request_error", code="request_too_large")


def rate_limit_exceeded(retry_after: float, message: str = _FULL) -> ApiError:
    """429: every replica is full now, the request would fit later (in ``retry_after`` seconds)."""
    return ApiError(
        429,
        message,
        "rate_limit_exceeded",
        code="rate_limit_exceeded",
        headers=_retry_after(retry_after),
    )


def reception_full(seconds: float) -> ApiError:
    """429: too many long bodies are being received, none of them ended for ``seconds``."""
    message = "The gateway is receiving as many long request bodies as it may. Retry later."
    return rate_limit_exceeded(seconds, message)


def service_unavailable(message: str, retry_after: float) -> ApiError:
    """503: no replica is there to take the request."""
    return ApiError(
        503,
        message,
        "service_unavailable",
        code="service_unavailable",
        headers=_retry_after(retry_after),
    )


def internal_error(status: int = 500, message: str = "Internal error.") -> ApiError:
    """5xx: a fault of the gateway, or one that a replica reported of itself."""
    return ApiError(status, message, "server_error", code="internal_error")


def bad_upstream_answer(message: str) -> ApiError:
    """502: a replica answered something that is no answer."""
    return ApiError(502, message, "server_error", code="bad_upstream_answer")


def upstream_timeout(message: str) -> ApiError:
    """504: a replica stayed silent too long. Not retried by clients: it would only add load."""
    return ApiError(504, message, "server_error", code="upstream_timeout", headers=_FINAL)


def stream_interrupted(message: str) -> ApiError:
    """The replica went away after the answer had started; only ever sent as an event."""
    return ApiError(502, message, "server_error", code="stream_interrupted")
