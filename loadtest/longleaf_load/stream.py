"""One streamed request, and the times at which its events come."""

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from longleaf_load.bounded import connect
from longleaf_load.records import Record

_CONTENT = re.compile(rb'"(?:content|text)":"(?!")')
_SECONDS = re.compile(r"\d{1,9}(?:\.\d+)?", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SENTENCE = re.compile(r"[^.]{1,120}")
_SIMULATED = "x-longleaf-simulated"
_HEADERS = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    "x-longleaf-details": "true",
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Client:
    """Sends requests to one base URL, each on a connection of its own.

    ``timeout``: seconds that a whole request may take. Works with plain threads and, where sockets
    are patched, with greenlets.
    """

    def __init__(self, url: str, api: str, timeout: float, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or parts.hostname is None:
            raise ValueError(f"{url!r} is no URL like http://host:8080")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/") + PATHS[api]
        self._timeout = timeout
        self._headers = dict(_HEADERS)
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def ask(self, body: Mapping[str, Any], record: Record, leave_after: int | None = None) -> None:
        """Send ``body`` and fill in ``record``. ``leave_after``: close the connection after so many
        events; 0 closes it before the first, a moment after the request was sent.
        """
        payload = json.dumps(body, separators=(",", ":")).encode()
        connection: http.client.HTTPConnection | None = None
        begun = time.monotonic()
        try:
            connection = connect(self._host, self._port, self._secure, self._timeout)
            connection.request("POST", self._path, payload, self._headers)
            if leave_after == 0:
                record.outcome, record.reason = "cancelled", "before the first token"
                return
            answer = connection.getresponse()
            record.status = answer.status
            record.fingerprint = answer.headers.get(_SIMULATED)
            if answer.status != 200:
                _refused(answer, record)
            else:
                _read(answer, record, begun, leave_after)
        except TimeoutError:
            record.outcome, record.reason = "failed", "timeout"
        except (OSError, http.client.HTTPException) as error:
            record.reason = type(error).__name__
        finally:
            record.seconds = time.monotonic() - begun
            if connection is not None:
                _end(connection)


def _end(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _refused(answer: http.client.HTTPResponse, record: Record) -> None:
    record.outcome, record.reason = "refused", f"{answer.status}"
    told = answer.headers.get("retry-after")
    record.retry_after = None if told is None else _seconds(told)
    wrong = (ValueError, TypeError, KeyError, RecursionError)
    with contextlib.suppress(*wrong, ConnectionError, http.client.HTTPException):
        error = json.loads(answer.read())["error"]
        record.reason = str(error["code"] or error["type"])
        if answer.status in {429, 503}:
            record.reason = _saturated(record.reason, error["message"])


def _saturated(code: str, message: str) -> str:
    """A code that stands for several causes (a full queue, a wait that was too long, a key's
    limit), with the sentence that tells which; numbers would make a cause of each request.
    """
    sentence = _SENTENCE.match(_NUMBER.sub("N", message))
    return f"{code}: {sentence[0]}" if sentence else code


def _seconds(told: str) -> float | None:
    """Of a ``Retry-After``: a number, or a date; None for anything else."""
    if _SECONDS.fullmatch(told):
        return float(told)
    try:
        date = parsedate_to_datetime(told)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _read(
    answer: http.client.HTTPResponse, record: Record, begun: float, leave_after: int | None
) -> None:
    times: list[float] = []
    text: list[bytes] = []
    tail: list[bytes] = []
    done = False
    while True:
        line = answer.readline()
        if not line:
            break
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        if line.startswith(b"data: [DONE]"):
            done = True
            break
        tail.append(line)
        if len(tail) > 4:
            del tail[0]
        if line.startswith(b'data: {"error"'):
            _error(line, record)
            return
        if not _CONTENT.search(line):
            continue
        text.append(line)
        times.append(now - begun)
        record.events += 1
        record.ttft = times[0]
        if leave_after is not None and record.events >= leave_after:
            _note(line, record)
            record.outcome, record.reason = "cancelled", "after the first token"
            return
    for line in (*tail, *text[:1]):
        _note(line, record)
    if not done or not times:
        record.reason = "broke off"
        return
    record.outcome, record.reason = "ok", None
    note_times(times, record)
    record.answer = "".join(map(_content, text))


def note_times(times: Sequence[float], record: Record) -> None:
    """What the ``times`` of an answer's events say, in seconds since it was asked for."""
    gaps = sorted(after - before for before, after in pairwise(times))
    if gaps:
        record.gap_max = gaps[-1]
        record.gap_p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    if record.completion_tokens is not None and record.completion_tokens > 1:
        record.tpot = (times[-1] - times[0]) / (record.completion_tokens - 1)


def _error(line: bytes, record: Record) -> None:
    record.reason = "error in stream"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(line[6:])["error"]
        record.reason = f"stream: {error.get('code') or error.get('type')}"


def _note(line: bytes, record: Record) -> None:
    """Take the figures of one chunk: usage, fingerprint, what the gateway adds."""
    with contextlib.suppress(ValueError, TypeError):
        chunk = json.loads(line[6:])
        record.fingerprint = chunk.get("system_fingerprint") or record.fingerprint
        usage = chunk.get("usage")
        if usage:
            record.counted_tokens = usage.get("prompt_tokens")
            record.completion_tokens = usage.get("completion_tokens")
        told = chunk.get("longleaf")
        if told:
            record.commit_len, record.steps = told.get("commit_len"), told.get("steps")
            record.queue_seconds = told.get("queue_seconds")
            record.prefill_seconds = told.get("prefill_seconds")
            record.replica = told.get("replica")


def _content(line: bytes) -> str:
    try:
        choice = json.loads(line[6:])["choices"][0]
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    except (ValueError, LookupError):
        return ""
