"""Recordings of a source: what it said it could tell, and its samples, to be replayed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longleaf.exporters.source import Figures, Source, SourceError


class Recorded:
    """Replays one source of a recording; after its last sample, the last again."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.name = str(found["source"])
        self._found = found
        self._next = 0

    @property
    def samples(self) -> Sequence[Mapping[str, Figures] | str]:
        """What it said, in order; a text is the error that it gave instead."""
        samples: Sequence[Mapping[str, Figures] | str] = self._found.get("samples", ())
        return samples

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        if "error" in self._found:
            raise SourceError(self._found["error"])
        self._next = 0
        supported: Mapping[str, str] = self._found["supported"]
        return supported

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return {
            index: (name, uuid, driver)
            for index, (name, uuid, driver) in self._found.get("gpus", {}).items()
        }

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        found = self.samples[min(self._next, len(self.samples) - 1)]
        self._next += 1
        if isinstance(found, str):
            raise SourceError(found)
        return found

    def close(self) -> None:
        """See ``Source``."""


class Recorder:
    """Passes a source on and keeps what it says."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._source = source
        self._found: dict[str, Any] = {"source": source.name, "samples": []}

    @property
    def found(self) -> Mapping[str, Any]:
        """The recording so far, as ``Recorded`` takes it."""
        return self._found

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        try:
            self._found["supported"] = self._source.open()
        except SourceError as error:
            self._found["error"] = str(error)
            raise
        self._found["gpus"] = self._source.identify()
        supported: Mapping[str, str] = self._found["supported"]
        return supported

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return self._source.identify()

    def sample(self) -> Mapping[str, Figures]:
        """See ``Source``."""
        try:
            found = self._source.sample()
        except SourceError as error:
            self._found["samples"].append(str(error))
            raise
        self._found["samples"].append({index: dict(figures) for index, figures in found.items()})
        return found

    def close(self) -> None:
        """See ``Source``."""
        self._source.close()


def load_recording(path: Path) -> list[Recorded]:
    """The sources of a recording, in order."""
    return [Recorded(found) for found in json.loads(path.read_text())["sources"]]


def save_recording(path: Path, recorders: list[Recorder], note: str) -> None:
    """Write what ``recorders`` kept. ``note``: where it was taken, and of what."""
    document = {"note": note, "sources": [recorder.found for recorder in recorders]}
    path.write_text(json.dumps(document, indent=1) + "\n")
