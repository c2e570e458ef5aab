"""What one launcher holds while it runs: the address of its server, and the ready file."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class HeldError(RuntimeError):
    """Another launcher holds what this one needs; the message says what, and what to do."""


@contextlib.contextmanager
def held_address(url: str) -> Iterator[None]:
    """Hold a server's address before it listens there, which takes it minutes.

    The name is in the network's namespace, as the address is, and free when the process ends.
    Raises HeldError where another launcher holds it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as name:
        try:
            name.bind(f"\0longleaf-engine {url}")
        except OSError as error:
            raise HeldError(
                f"another longleaf engine holds {url}; fix: end it, or give another --port"
            ) from error
        yield


class ReadyFile:
    """The file that exists only while the server is up and warm; None for no file.

    Its owner keeps it locked: what is not locked is left from a launcher that was killed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def prepare(self) -> None:
        """Remove what a killed launcher left; raises HeldError for a path that will not do."""
        path = self._path
        if path is None:
            return
        try:
            if path.exists():
                with path.open() as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            if not os.access(path.parent, os.W_OK):
                raise NotADirectoryError(f"{path.parent} is no folder that can be written")
        except BlockingIOError:
            raise HeldError(
                f"--ready-file {path} is that of a running longleaf engine; fix: give another"
            ) from None
        except OSError as error:
            raise HeldError(
                f"--ready-file {path} cannot be written ({error.strerror or error}); fix: give a "
                "file in a folder that exists"
            ) from error

    def write(self, url: str) -> None:
        """Say that the server is ready."""
        if self._path is not None:
            self._file = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(f"{url}\n")
            self._file.flush()

    def remove(self) -> None:
        """Say that the server is not ready; only what this launcher wrote is removed."""
        if self._path is not None and self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
