"""Recordings of a source: what it said it could tell, and its samples, to be replayed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from longleaf.exporters.source import Figures, Source, SourceError


class _SourceRecord(BaseModel):
    """What one source said; nothing but its name where it was not asked."""

    source: Literal["nvml_gpm", "dcgm", "cupti_pm", "nvml"]
    supported: dict[str, str] = {}
    error: str = ""
    gpus: dict[str, tuple[str, str, str]] = {}
    samples: list[dict[str, dict[str, float]] | str] = []


class _Recording(BaseModel):
    sources: list[_SourceRecord]


class Recorded:
    """Replays one source of a recording; after its last sample, the last again."""

    def __init__(self, found: _SourceRecord) -> None:
        self.name: str = found.source
        self._found = found
        self._next = 0

    @property
    def samples(self) -> Sequence[Mapping[str, Figures] | str]:
        """What it said, in order; a text is the error that it gave instead."""
        return self._found.samples

    def open(self) -> Mapping[str, str]:
        """See ``Source``."""
        if self._found.error or not self.samples:
            raise SourceError(self._found.error or "no sample of it was recorded")
        self._next = 0
        return self._found.supported

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """See ``Source``."""
        return self._found.gpus

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
        except Exception as error:
            if "supported" not in self._found:
                self._found["error"] = str(error) or type(error).__name__
            raise
        self._found.pop("error", None)
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
        except Exception as error:
            self._found["samples"].append(str(error) or type(error).__name__)
            raise
        self._found["samples"].append({index: dict(figures) for index, figures in found.items()})
        return found

    def close(self) -> None:
        """See ``Source``."""
        self._source.close()


def load_recording(path: Path) -> list[Recorded]:
    """The sources of a recording, in order; ``ValueError`` says why it is none."""
    try:
        found = _Recording.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"no recording: {f'{place}: ' if place else ''}{first['msg']}") from error
    return [Recorded(source) for source in found.sources]


def save_recording(path: Path, recorders: list[Recorder], note: str) -> None:
    """Write what ``recorders`` kept. ``note``: where it was taken, and of what."""
    document = {"note": note, "sources": [recorder.found for recorder in recorders]}
    path.write_text(json.dumps(document, indent=1) + "\n")
