"""``longleaf engine -- <sglang args>``: check, start SGLang, warm it up, and watch it.

SGLang answers as soon as it listens, which is before the warm-up. Ready is therefore told by the
launcher: one line ``ready`` on standard output, and the file of --ready-file, which exists only
while the server is up and warm. A Kubernetes readiness probe is ``test -f FILE``; the gateway
follows ready pods, and where there is no cluster it is to be started after the line.

The address and the ready file are held while the launcher runs, so that a second start with the
same ones is refused and harms nothing. Whatever ends the launcher ends what it started, SIGKILL
too.

Exit status: 2 for a drift, found before anything started; the server's own where it ended by
itself or after a signal (1 where that would be 0 without a signal); 1 for a start that failed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from longleaf.engine.drift import EXIT_CODE
from longleaf.engine.held import HeldError, ReadyFile, held_address
from longleaf.engine.process import Server, ended_with_us, killed_on_error
from longleaf.engine.warmup import (
    CLIENT_VARIABLE,
    Client,
    HttpError,
    has_grammar,
    warmup_requests,
)
from longleaf.options import FiniteRange
from longleaf.signals import raised

CHECK = (sys.executable, "-m", "longleaf.engine.check")
SERVER = (sys.executable, "-m", "sglang.launch_server")
_PROGRESS_SECONDS = 10.0
_DYING_SECONDS = 3.0
"""A connection breaks a moment before the process that held it has ended."""


class StartError(RuntimeError):
    """The server did not become ready; the message says what it was waited for."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Arguments of the server, where readiness is written, and limits in seconds.

    check, server: the commands that the arguments are appended to.
    """

    arguments: tuple[str, ...]
    ready_file: Path | None = None
    start_seconds: float = 1800.0
    stop_seconds: float = 120.0
    check: tuple[str, ...] = CHECK
    server: tuple[str, ...] = SERVER


def run_check(arguments: Sequence[str], check: Sequence[str] = CHECK) -> int:
    """Run the check, start nothing; returns the exit status. A signal ends the check too."""
    with raised():
        process = subprocess.Popen([*check, *arguments], preexec_fn=ended_with_us(signal.SIGKILL))
        with killed_on_error(process):
            status = process.wait()
    return status if status >= 0 else 1


def checked(config: LaunchConfig) -> Client | int:
    """Run the check; returns the client of the server to be, or the exit status of a refusal.

    SGLang's own parser says where the server will listen, and only the check loads it.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        try:
            process = subprocess.Popen(
                [*config.check, *config.arguments],
                pass_fds=(writing,),
                env={**os.environ, CLIENT_VARIABLE: str(writing)},
                preexec_fn=ended_with_us(signal.SIGKILL),
            )
        finally:
            os.close(writing)
        with killed_on_error(process):
            told = pipe.read()
            status = process.wait()
    if status != 0:
        return status if status > 0 else 1
    if not told and not {"-h", "--help"}.isdisjoint(config.arguments):
        return 0  # SGLang's parser has told its arguments instead
    try:
        return Client(**json.loads(told))
    except (ValueError, TypeError):
        click.echo("longleaf engine: the check did not tell where the server will listen", err=True)
        return 1


class Launcher:
    """Takes one server from its check to its end."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._ready = ReadyFile(config.ready_file)

    def run(self) -> int:
        """Check, start, warm up, watch; returns the exit status.

        A signal during the check raises ``SystemExit``; later ones are the server's.
        """
        with raised():
            try:
                self._ready.prepare()
                found = checked(self._config)
                if isinstance(found, int):
                    return found
                self._client = found
                with held_address(found.url):
                    return self._serve()
            except HeldError as error:
                click.echo(f"longleaf engine: {error}", err=True)
                return EXIT_CODE

    def _serve(self) -> int:
        config = self._config
        server = Server([*config.server, *config.arguments])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: server.forward(got))
        try:
            begin = time.monotonic()
            self._start(server, begin + config.start_seconds)
            if not server.signalled():
                self._ready.write(self._client.url)
                click.echo(f"ready after {time.monotonic() - begin:.0f} s: {self._client.url}")
            return self._watch(server)
        except StartError as error:
            click.echo(f"longleaf engine: {error}", err=True)
            return server.status or 1
        finally:
            self._ready.remove()
            server.end(config.stop_seconds)

    def _start(self, server: Server, deadline: float) -> None:
        for path in ("/model_info", "/v1/loads"):
            self._wait_for(server, path, deadline)
        info = self._ask(server, deadline)
        for name, body in warmup_requests(info):
            if server.signalled():
                return
            click.echo(f"longleaf engine: warm-up, {name}", err=True)
            try:
                self._client.generate(body, max(1.0, deadline - time.monotonic()))
            except HttpError as error:
                if server.signalled():
                    return
                self._raise_if_ended(server, f"the warm-up request ({name})", _DYING_SECONDS)
                raise StartError(f"the warm-up request ({name}) failed: {error}") from error

    def _ask(self, server: Server, deadline: float) -> bool:
        try:
            info = self._client.get("/server_info", max(1.0, deadline - time.monotonic()))
        except HttpError as error:
            self._raise_if_ended(server, "/server_info", _DYING_SECONDS)
            raise StartError(str(error)) from error
        return has_grammar(info)

    def _wait_for(self, server: Server, path: str, deadline: float) -> None:
        """Poll until ``path`` answers 200; says every 10 s what it waits for."""
        begin = said = time.monotonic()
        last = ""
        while not server.signalled():
            self._raise_if_ended(server, path)
            try:
                self._client.get(path, 5.0)
            except HttpError as error:
                last = str(error)
            else:
                return
            now = time.monotonic()
            if now > deadline:
                raise StartError(
                    f"not ready after {self._config.start_seconds:.0f} s (--start-seconds), "
                    f"waiting for {path}: {last}"
                )
            if now - said >= _PROGRESS_SECONDS:
                said = now
                click.echo(f"longleaf engine: {now - begin:.0f} s, waiting for {path}", err=True)
            server.wait(0.2)

    @staticmethod
    def _raise_if_ended(server: Server, waiting_for: str, seconds: float = 0.0) -> None:
        if server.wait(seconds) is None or server.signalled():
            return
        raise StartError(
            f"the server ended with status {server.status} before it was ready, waiting for "
            f"{waiting_for}; its last lines:\n{server.tail()}"
        )

    def _watch(self, server: Server) -> int:
        while True:
            status = server.wait(0.5)
            if server.signalled():
                self._ready.remove()
                status = server.wait(self._config.stop_seconds)
                return 1 if status is None else status
            if status is not None:
                click.echo(
                    f"longleaf engine: the server ended by itself with status {status}; its last "
                    f"lines:\n{server.tail()}",
                    err=True,
                )
                return status or 1


class _EngineCommand(click.Command):
    """Says where SGLang's arguments go to whoever leaves the -- out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} SGLang's arguments go after --.", ctx
            ) from error


@click.command("engine", cls=_EngineCommand)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Exists while ready.")
@click.option(
    "--start-seconds",
    default=1800.0,
    show_default=True,
    type=FiniteRange(0.0, min_open=True),
    help="Give up starting after this.",
)
@click.option(
    "--stop-seconds",
    default=120.0,
    show_default=True,
    type=FiniteRange(0.0, min_open=True),
    help="Longest drain.",
)
@click.option("--check-only", is_flag=True, help="Run the checks and start nothing.")
@click.argument("sglang_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def engine_command(
    ctx: click.Context,
    ready_file: Path | None,
    start_seconds: float,
    stop_seconds: float,
    check_only: bool,
    sglang_args: tuple[str, ...],
) -> None:
    """Start SGLang with the DDTREE plugin, checked and warmed up.

    Arguments after -- go to `python -m sglang.launch_server`.
    """
    if check_only:
        ctx.exit(run_check(sglang_args))
    ctx.exit(Launcher(LaunchConfig(sglang_args, ready_file, start_seconds, stop_seconds)).run())
