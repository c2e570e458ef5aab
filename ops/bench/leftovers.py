"""No run leaves processes behind, and none measures those of another one."""

import signal
import socket
import sys
from collections.abc import Iterable

import click


def check_free(ports: Iterable[int]) -> None:
    """``click.ClickException`` names the first port of this machine that something listens on: its
    answers would pass for those of what is started there.
    """
    for port in ports:
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError as error:
            raise click.ClickException(
                f"port {port} is taken ({error.strerror}): is another run's stack still there?"
            ) from None


def unwind_on_sigterm() -> None:
    """SIGTERM ends this process as an exception does, so that what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
