"""A client of SGLang's /generate that keeps when each event came and what it brought."""

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


class EngineError(RuntimeError):
    """The server answered with an error, or ended a stream without an end."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. at: seconds since the request was sent; tokens: generated so far."""

    at: float
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer. logprobs: of each token, where asked for; top: [(logprob, id), ...].

    begin: when the request was sent, in seconds of `time.perf_counter`.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    steps: int
    events: tuple[Event, ...]
    begin: float
    meta: dict[str, Any] = field(repr=False)

    @property
    def first_token_seconds(self) -> float:
        """Time to the first event."""
        return self.events[0].at

    @property
    def commit_len(self) -> float:
        """Mean tokens a verify step; the first token comes from prefill and does not count."""
        return (len(self.tokens) - 1) / max(1, self.steps)

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each answered token."""
        return [float(entry[0]) for entry in self.meta["output_token_logprobs"]]

    @property
    def top_logprobs(self) -> list[list[tuple[float, int]]]:
        """The most probable tokens at each position, best first: (log-probability, id)."""
        return [
            [(float(entry[0]), int(entry[1])) for entry in entries]
            for entries in self.meta["output_top_logprobs"]
        ]


class Client:
    """Speaks to one server at 127.0.0.1; usable from several threads."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, timeout: float = 10.0) -> bytes:
        """Return the body of a GET.

        Raises:
            EngineError: on any status but 200.
        """
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: object, timeout: float = 60.0) -> bytes:
        """Return the body of a POST of JSON.

        Raises:
            EngineError: on any status but 200.
        """
        return self._call("POST", path, body, timeout)

    def json(self, path: str, body: object = None, timeout: float = 60.0) -> Any:
        """Return a JSON answer; POST where there is a body, else GET."""
        answer = self.get(path, timeout) if body is None else self.post(path, body, timeout)
        return json.loads(answer)

    def generate(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        top_logprobs: int = 0,
        rid: str | None = None,
        timeout: float = 300.0,
        **sampling: object,
    ) -> Generation:
        """Stream one answer to a prompt of token ids or text, and return it whole.

        top_logprobs: how many alternatives to report at each position; 0 reports none.

        Raises:
            EngineError: when the server refuses, or the stream ends early.
        """
        body: dict[str, object] = {
            "text" if isinstance(prompt, str) else "input_ids": prompt
            if isinstance(prompt, str)
            else [int(token) for token in prompt],
            "stream": True,
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
                **sampling,
            },
        }
        if rid is not None:
            body["rid"] = rid
        if top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
        return self._stream(body, timeout)

    def draw(
        self, prompt: Sequence[int], max_tokens: int, draws: int, **sampling: object
    ) -> list[tuple[int, ...]]:
        """Sample many answers to one prompt, each of ``max_tokens`` tokens."""
        answers: list[tuple[int, ...]] = []
        while len(answers) < draws:
            count = min(256, draws - len(answers))
            body = {
                "input_ids": [[int(token) for token in prompt]] * count,
                "sampling_params": {"max_new_tokens": max_tokens, "ignore_eos": True, **sampling},
            }
            answers += [tuple(item["output_ids"]) for item in self.json("/generate", body, 300.0)]
        return answers

    def start_stream(self, body: object, timeout: float = 60.0) -> http.client.HTTPResponse:
        """Return the open response of a streamed request, for a caller that may leave early.

        Closing it closes the connection: it owns the socket because the request says close.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        return connection.getresponse()

    def free_tokens(self) -> int:
        """Return the free slots of the KV pool, cached ones counted as free.

        Counts what running requests do not hold: the server drops cached prefixes as it needs.
        """
        load = self.json("/v1/loads")["loads"][0]
        return int(load["max_total_num_tokens"]) - int(load["num_used_tokens"])

    def _stream(self, body: object, timeout: float) -> Generation:
        begin = time.perf_counter()
        response = self.start_stream(body, timeout)
        events: list[Event] = []
        last: dict[str, Any] = {}
        tokens: list[int] = []
        with response:
            if response.status != 200:
                raise EngineError(f"{response.status}: {response.read()[:400]!r}")
            while line := response.readline():
                at = time.perf_counter() - begin
                if not line.startswith(b"data: {"):
                    continue
                data = json.loads(line[6:])
                if "error" in data:
                    raise EngineError(f"stream ended with {data['error']}")
                last = data
                meta = data["meta_info"]
                events.append(
                    Event(at, int(meta["completion_tokens"]), int(meta.get("spec_verify_ct", 0)))
                )
                tokens = data["output_ids"]
        if not last or last["meta_info"].get("finish_reason") is None:
            raise EngineError(f"stream ended after {len(events)} events without a finish reason")
        meta = last["meta_info"]
        return Generation(
            tokens=tuple(tokens),
            text=last.get("text", ""),
            finish=meta["finish_reason"]["type"],
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            steps=int(meta.get("spec_verify_ct", 0)),
            events=tuple(events),
            begin=begin,
            meta=meta,
        )

    def _call(self, method: str, path: str, body: object, timeout: float) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            if body is None:
                connection.request(method, path)
            else:
                connection.request(
                    method, path, json.dumps(body), {"Content-Type": "application/json"}
                )
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(f"{method} {path}: {response.status} {answer[:400]!r}")
        return answer


def ask_all(
    client: Client,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    at_once: int = 8,
    **options: Any,
) -> list[Generation]:
    """Answer prompts, several at a time, in the order given."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(client.generate, p, max_tokens, **options) for p in prompts]
        return [future.result() for future in futures]
