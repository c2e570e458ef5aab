"""Where GPU figures come from: a source says first what it can tell, then tells it."""

from collections.abc import Mapping
from typing import Protocol

LEAST_INTERVAL = 0.1
"""Seconds between samples at least: counters are sampled in windows of about that."""

Figures = Mapping[str, float]
"""Values by metric (``longleaf.metrics.GPU_METRICS``); what is unknown is not there."""


class SourceError(RuntimeError):
    """The source cannot be used, or can no longer; the message says why."""


class Source(Protocol):
    """One way to ask the GPUs. Used by one thread."""

    name: str

    def open(self) -> Mapping[str, str]:
        """Prepare, and return every metric that this source is for: "" if all GPUs here that are
        not lost have it, otherwise why not. ``SourceError`` if the source as a whole cannot be
        used.
        """

    def identify(self) -> Mapping[str, tuple[str, str, str]]:
        """Name, UUID and driver of each GPU, by index; empty if this source cannot tell."""

    def sample(self) -> Mapping[str, Figures]:
        """Figures of each GPU, by index, since the sample before; none of one that is lost.
        ``SourceError`` if it fails.
        """

    def close(self) -> None:
        """Give back what ``open`` took."""
