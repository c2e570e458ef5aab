"""Files of a run: one that cannot be written keeps none of the others from it."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Outputs:
    """Writes to ``folder``; ``failures`` says what could not be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.failures: list[str] = []

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Let ``write`` write a file; the part of it that was written stays."""
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            self.failures.append(f"{path} could not be written: {error.strerror or error}")

    def write_whole(self, name: str, text: str) -> None:
        """Write a file wholly, or leave none of that name: an earlier run's would pass for this
        one's. An empty ``text`` is no file.
        """
        path, part = self._folder / name, self._folder / f"{name}.part"
        with suppress(OSError):
            path.unlink()
        if not text:
            return

        def replace(_: Path) -> None:
            try:
                part.write_text(text, encoding="utf-8")
                os.replace(part, path)
            except OSError:
                with suppress(OSError):
                    part.unlink()
                raise

        self.write(name, replace)
