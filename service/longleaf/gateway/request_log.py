"""One JSON line per request; never a word of a prompt or an answer."""

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

logger = logging.getLogger("longleaf.gateway.request")


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
    replica: str | None = None
    attempts: int = 0

    def write(self, ended: float) -> None:
        """Log the request; ``ended`` is a ``perf_counter`` value."""
        first = None if self.first_byte is None else round(self.first_byte - self.started, 6)
        fields: dict[str, object] = {
            "rid": self.rid,
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(ended - self.started, 6),
            "first_byte_seconds": first,
            "stream": self.stream,
            "model": self.model,
            "body_bytes": self.body_bytes,
            "sent_bytes": self.sent_bytes,
            "prompt_tokens": self.prompt_tokens,
            "replica": self.replica,
            "attempts": self.attempts,
        }
        level = logging.DEBUG if self.route in {"livez", "readyz"} else logging.INFO
        logger.log(level, "request", extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """Formats every record as one JSON object a line, with the record's ``fields`` beside it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON: time (UTC, ISO 8601), level, logger, message, fields, exception."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
