"""Errors in SGLang's two shapes: flat in a JSON answer, nested in a stream."""

import json
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse


class ApiError(Exception):
    """A request that is answered with an error. ``kind`` is the body's ``type``; None follows
    SGLang's habit.
    """

    def __init__(self, message: str, status: int = 400, kind: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind or ("BadRequestError" if status == HTTPStatus.BAD_REQUEST else str(status))

    def response(self) -> JSONResponse:
        """The answer before a stream begins: status and flat body."""
        return JSONResponse(error_body(self.message, self.kind, self.status), self.status)

    def event(self) -> bytes:
        """The same as one event of a stream whose status is 200 already."""
        body = error_body(self.message, HTTPStatus(self.status).name, self.status)
        return b"data: " + json.dumps({"error": body}).encode() + b"\n\n"


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """SGLang's error object, fields in its order."""
    return {
        "object": "error",
        "message": message,
        "type": kind,
        "param": None,
        "code": int(status),
    }
