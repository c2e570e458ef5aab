"""The first requests of a server, so that no later one compiles anything. Standard library only."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CLIENT_VARIABLE = "LONGLEAF_ENGINE_CLIENT_FD"
"""File descriptor that the check writes the fields of a `Client` to, as JSON."""
GREEDY_TOKENS = 96
"""More steps than there are widths even where every step commits a whole block: the adaptive
budget goes through every captured width first."""
_PASSAGE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 24
_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
}


class HttpError(RuntimeError):
    """The server did not answer as it should."""


@dataclass(frozen=True, slots=True)
class Client:
    """Talks to one server, past any proxy. url: without a slash at the end. api_key: None for none.

    certificate: of an https server, a PEM file: the one certificate that is trusted, whatever
    names it is for. Raises HttpError for a file that cannot be read.
    """

    url: str
    api_key: str | None = None
    certificate: str | None = None

    def get(self, path: str, seconds: float) -> Any:
        """Return the JSON that the server answers; raises HttpError."""
        return self._open(urllib.request.Request(self.url + path), seconds)

    def generate(self, body: Mapping[str, Any], seconds: float) -> Any:
        """Send one /generate request; raises HttpError for anything but an answer."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + "/generate", data, {"Content-Type": "application/json"}
        )
        return self._open(request, seconds)

    def _opener(self) -> urllib.request.OpenerDirector:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False  # its own certificate, at an address of this machine
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(self.certificate)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers)

    def _open(self, request: urllib.request.Request, seconds: float) -> Any:
        if self.api_key is not None:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        try:
            with self._opener().open(request, timeout=seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            raise HttpError(f"{request.selector} answered {error.code}: {said}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise HttpError(f"{request.selector}: {error}") from error


def warmup_requests(grammar: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and body of every warm-up request, in order."""
    greedy = {"temperature": 0, "max_new_tokens": GREEDY_TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "max_new_tokens": 32}
    yield "greedy", {"text": _PASSAGE, "sampling_params": greedy}
    yield "sampled", {"text": "Once upon a time", "sampling_params": sampled}
    short = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    yield "extend", {"text": _PASSAGE + "And then?", "sampling_params": short}
    # Beyond every captured width, so that it runs operator by operator.
    yield "long extend", {"text": _PASSAGE + _PASSAGE.upper(), "sampling_params": short}
    # Of a single request and of several: SGLang compiles for each.
    penalised = {**short, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "min_new_tokens": 2}
    yield "penalties", {"text": "One by one", "sampling_params": penalised}
    yield "penalties of two", {"text": ["One of two", "Two of two"], "sampling_params": penalised}
    if grammar:
        schema = {"temperature": 0, "max_new_tokens": 24, "json_schema": json.dumps(_SCHEMA)}
        yield "JSON schema", {"text": "Answer in JSON: 1 + 1 = ", "sampling_params": schema}


def has_grammar(server_info: Mapping[str, Any]) -> bool:
    """Return whether the server takes JSON schemas, as its /server_info says."""
    return server_info.get("grammar_backend") not in (None, "none")
