"""What ``make observe`` is told, checked before anything starts."""

import re
import socket
from collections.abc import Mapping

import click

_DURATION = re.compile(r"(?=.*[1-9])(?:\d+(?:ms|[smhdwy]))+")
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})")


class Duration(click.ParamType[str]):
    """How Prometheus writes one: ``5s``, ``1m30s``."""

    name = "duration"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See ``ParamType``."""
        if not _DURATION.fullmatch(value):
            self.fail(f"{value!r} is no duration above 0, such as 5s or 1m30s", param, ctx)
        return value


class Address(click.ParamType[str]):
    """``HOST:PORT``."""

    name = "host:port"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See ``ParamType``."""
        found = _ADDRESS.fullmatch(value)
        if found is None or not 0 < int(found["port"]) < 65_536:
            self.fail(f"{value!r} is not HOST:PORT", param, ctx)
        return value


def require_free(ports: Mapping[str, int]) -> None:
    """``ClickException`` for the first of ``ports``, by option, that two want or that is in use:
    another Prometheus there would be taken for this one.
    """
    wanted: dict[int, str] = {}
    for option, port in ports.items():
        if port in wanted:
            raise click.ClickException(f"{option} {port}: {wanted[port]} is the same")
        wanted[port] = option
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            raise click.ClickException(f"{option} {port}: {error.strerror}") from error


def answers(address: str) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True
