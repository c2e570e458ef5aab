"""One JSON line per request; never a word of a prompt or an answer."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TextIO

from pydantic_core import to_json

logger = logging.getLogger("longleaf.gateway.request")

_HOLD_SECONDS = 0.05


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request while it runs; written out when it ends."""

    rid: str
    """Our own id (32 hex digits): the engine knows the request by it."""
    request_id: str
    """The id the client sees: its own ``x-request-id``, or ours."""
    method: str
    route: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    reason: str = "ok"
    first_byte: float | None = None
    """``perf_counter`` at the first byte of the answer's body."""
    stream: bool = False
    model: str | None = None
    body_bytes: int = 0
    sent_bytes: int = 0
    prompt_tokens: int | None = None
    prompt_bytes: int | None = None
    """Most tokens that the prompt can have, where nobody counted."""
    completion_tokens: int | None = None
    replica: str | None = None
    attempts: int = 0
    queue_seconds: float | None = None
    """Time until there was a place on a replica."""
    prefill_seconds: float | None = None
    """Time from sending it to the replica to its first event."""
    first_event: float | None = None
    """``perf_counter`` at the first event of the answer (the whole of it, if it is no stream)."""
    trace_id: str | None = None

    def note_first_event(self, prefill_seconds: float) -> None:
        """The replica answered."""
        self.prefill_seconds = prefill_seconds
        self.first_event = time.perf_counter()

    @property
    def context_tokens(self) -> int:
        """Prompt tokens; about a fourth of its bytes where neither we nor the engine counted."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return (self.prompt_bytes or 0) // 4

    def write(self, ended: float) -> None:
        """Log the request; ``ended`` is a ``perf_counter`` value."""
        level = logging.DEBUG if self.route in {"livez", "readyz"} else logging.INFO
        if not logger.isEnabledFor(level):
            return
        first = None if self.first_byte is None else self.first_byte - self.started
        fields: dict[str, object] = {
            "rid": self.rid,
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "reason": self.reason,
            "seconds": _rounded(ended - self.started),
            "first_byte_seconds": _rounded(first),
            "stream": self.stream,
            "model": self.model,
            "body_bytes": self.body_bytes,
            "sent_bytes": self.sent_bytes,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "queue_seconds": _rounded(self.queue_seconds),
            "prefill_seconds": _rounded(self.prefill_seconds),
            "replica": self.replica,
            "attempts": self.attempts,
        }
        if self.trace_id is not None:
            fields["trace_id"] = self.trace_id
        logger.handle(_RequestLine(level, fields))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6) / 1e6


class _RequestLine(logging.LogRecord):
    """As ``logger.log(level, "request", extra={"fields": fields})`` makes it, without looking for
    the caller, the thread and the process, which costs more than the line.
    """

    def __init__(self, level: int, fields: dict[str, object]) -> None:
        now = time.time()
        self.__dict__ = {**_LINE, "created": now, "msecs": now % 1 * 1e3, "fields": fields}
        if level != logging.INFO:
            self.levelno, self.levelname = level, logging.getLevelName(level)


_LINE = vars(logging.LogRecord(logger.name, logging.INFO, __file__, 0, "request", None, None))


class JsonFormatter(logging.Formatter):
    """Formats every record as one JSON object a line, with the record's ``fields`` beside it."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._date = 0, ""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON: time (UTC, ISO 8601), level, logger, message, fields, exception."""
        line: dict[str, object] = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line, fallback=str).decode()

    def _time(self, created: float) -> str:
        """A line's time; the date is written once for all lines of a second."""
        second = int(created)
        if second != self._second:
            self._date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._date}.{int((created - second) * 1e3):03d}+00:00"


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream, together: what is logged in ``_HOLD_SECONDS`` costs one write.

    Warnings and errors go out at once, and with them what was held.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, soon."""
        try:
            self._lines.append(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING or not self._flush_soon():
                self.flush()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Write what is held."""
        lines, self._lines = self._lines, []
        if lines:
            self.stream.write("".join(lines))
        super().flush()

    def _flush_soon(self) -> bool:
        """Whether somebody will flush."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        if loop is not self._loop or self._timer is None:
            self._loop = loop
            self._timer = loop.call_later(_HOLD_SECONDS, self._flush_now)
        return True

    def _flush_now(self) -> None:
        self._timer = None
        self.flush()
