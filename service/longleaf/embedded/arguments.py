"""Options that every command with SGLang's HTTP surface has, declared once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

from longleaf.options import FiniteRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArguments:
    """What was given for them. None: the model's own (``context_length``), its directory's name
    (``served_model_name``), no limit (``max_queued_requests``).
    """

    host: str
    port: int
    served_model_name: str | None
    context_length: int | None
    max_total_tokens: int
    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int
    max_body_bytes: int
    drain_seconds: float
    log_level: str


def server_options(
    *,
    served_model_name: str | None,
    context_length: int | None,
    max_total_tokens: int,
    chunked_prefill_size: int,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options to a command, with these defaults; it gets them as ``server``."""
    options = (
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen on."
        ),
        click.option(
            "--port",
            default=30000,
            show_default=True,
            type=click.IntRange(1, 65535),
            help="Port to listen on.",
        ),
        click.option(
            "--served-model-name",
            default=served_model_name,
            show_default=True if served_model_name else "the target's directory",
            help="Name in answers.",
        ),
        click.option(
            "--context-length",
            type=int,
            default=context_length,
            show_default=True if context_length else "the model's",
            help="Longest context.",
        ),
        click.option(
            "--max-total-tokens",
            default=max_total_tokens,
            show_default=True,
            help="Slots of a KV pool.",
        ),
        click.option(
            "--max-running-requests",
            default=8,
            show_default=True,
            help="Answers decoded together.",
        ),
        click.option(
            "--max-queued-requests",
            type=int,
            default=None,
            show_default="no limit",
            help="Waiting requests at most.",
        ),
        click.option(
            "--chunked-prefill-size",
            default=chunked_prefill_size,
            show_default=True,
            help="Prompt tokens of one forward.",
        ),
        click.option(
            "--max-body-bytes",
            default=64 << 20,
            show_default=True,
            type=click.IntRange(1),
            help="Largest request body.",
        ),
        click.option(
            "--drain-seconds",
            default=60.0,
            show_default=True,
            type=FiniteRange(0.0, 86_400.0),
            help="How long running answers may take after SIGTERM.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="warning",
            show_default=True,
            help="How much the server logs.",
        ),
    )
    names = [field.name for field in fields(ServerArguments)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_server(**given: Any) -> None:
            server = ServerArguments(**{name: given.pop(name) for name in names})
            command(server=server, **given)

        for option in reversed(options):
            with_server = option(with_server)
        return with_server

    return decorate
