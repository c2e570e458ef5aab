"""Asks simulated replicas what no request tells: whether they kept up with their curve."""

import re
import urllib.request
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException

from longleaf_load.records import Record
from longleaf_load.stream import Client

LABEL = "simulated:"
"""How the fingerprint of a simulated engine begins."""
_LOST = re.compile(r"^longleaf_simulation_lost_seconds(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)
_ANSWER_SECONDS = 10.0
_METRICS_SECONDS = 3.0
_AT_ONCE = 16
_MESSAGES = [{"role": "user", "content": "x"}]


def simulated(records: Iterable[Record]) -> list[str]:
    """The simulated engines that answered, by fingerprint."""
    prints = {one.fingerprint for one in records if one.fingerprint is not None}
    return sorted(one for one in prints if one.startswith(LABEL))


def label(url: str, api: str, model: str, key: str | None) -> str | None:
    """The fingerprint of what answers one token more, for runs in which nothing was answered."""
    prompt = {"prompt": "x"} if api == "completions" else {"messages": _MESSAGES}
    record = Record(
        arrival=0, phase=0, turn=1, attempt=1, text="prose", prompt_tokens=1, max_tokens=1,
        document=None, sent=0.0, late=0.0,
    )  # fmt: skip
    body = {"model": model, **prompt, "max_tokens": 1, "stream": True}
    Client(url, api, _ANSWER_SECONDS, key).ask(body, record)
    return record.fingerprint


class Lag:
    """How far simulated replicas fall behind their curve during a run, each from when it is seen
    first: a gateway tells who they are by its answers alone.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._begun: dict[str, Future[float | None]] = {}

    def see(self, url: str) -> None:
        """The replica at ``url`` takes part; it is asked aside."""
        if url not in self._begun:
            self._begun[url] = self._pool.submit(_lost, url)

    def seconds(self) -> float | None:
        """What the worst of them lost; None where none can be asked. The run is over."""
        ended = {url: self._pool.submit(_lost, url) for url in self._begun}
        lost = [
            max(0.0, end - begin)
            for url, begun in self._begun.items()
            if (end := ended[url].result()) is not None and (begin := begun.result()) is not None
        ]
        self._pool.shutdown(wait=False)
        return max(lost, default=None)


def _lost(url: str) -> float | None:
    with suppress(OSError, HTTPException, ValueError):
        metrics = url.rstrip("/") + "/metrics"
        with urllib.request.urlopen(metrics, timeout=_METRICS_SECONDS) as answer:
            told = _LOST.search(answer.read().decode())
        return None if told is None else float(told[1])
    return None
