"""Run a probe to its end and leave what it has, however it ends."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click

from longleaf.probes.client import ProbeError
from longleaf.probes.report import lines, write_json, write_page

_FAILED, _INTERRUPTED = 1, 130


class Run(Protocol):
    """A probe's run, complete or not."""

    @property
    def passed(self) -> bool:
        """Whether it ended, and found no fault."""

    def table(self) -> list[list[str]]:
        """Rows of text, the first a head."""

    def words(self) -> str:
        """The answer."""

    def document(self) -> dict[str, Any]:
        """The JSON document."""

    def page(self) -> str:
        """The HTML page."""


class OutFile(click.ParamType[Path]):
    """A file to write once the probe has ended: that it can be is seen before."""

    name = "file"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Make the folders that it needs."""
        path = Path(str(value))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.fail(f"{path.parent}: {error.strerror}", param, ctx)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{path} cannot be written", param, ctx)
        return path


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: ``interrupted`` by a signal, by an ``error``, or neither."""

    interrupted: bool = False
    error: Exception | None = None


def conduct(work: Coroutine[Any, Any, None]) -> Ending:
    """Run ``work`` until it ends, fails, or SIGINT, SIGTERM or SIGHUP comes."""
    return asyncio.run(_ending(work))


async def _ending(work: Coroutine[Any, Any, None]) -> Ending:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells ask
            loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return Ending(interrupted=True)
    except Exception as error:
        return Ending(error=error)
    return Ending()


def finish(
    ctx: click.Context,
    run: Run,
    ending: Ending,
    json_file: Path | None,
    html_file: Path | None,
    *others: tuple[Path | None, Callable[[Path], None]],
) -> None:
    """Print a run's table and words, write its files, and leave with the exit code that says it."""
    click.echo(lines(run.table()))
    click.echo(run.words() + " Interrupted." * ending.interrupted)
    failed = _write(
        (json_file, lambda path: write_json(path, run.document())),
        (html_file, lambda path: write_page(path, run.page())),
        *others,
    )
    if isinstance(ending.error, ProbeError):
        raise click.ClickException(str(ending.error)) from ending.error
    if ending.error is not None:
        raise ending.error
    if failed:
        raise click.ClickException("; ".join(failed))
    ctx.exit(_INTERRUPTED if ending.interrupted else 0 if run.passed else _FAILED)


def _write(*files: tuple[Path | None, Callable[[Path], None]]) -> Sequence[str]:
    """Write those that are asked for; gives what failed."""
    failed = []
    for path, write in files:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")
    return failed
