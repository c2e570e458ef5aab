"""The entry point that SGLang calls in each of its processes."""

import os
import sys
from dataclasses import dataclass

from longleaf.engine.drift import EXIT_CODE, GUARD_VARIABLE, DriftError


@dataclass(frozen=True, slots=True)
class Registration:
    """What the plugin registered: classes and the numbers of the patches it applied."""

    algorithm: type
    backend: type
    patches: tuple[int, ...]


def register() -> None:
    """Check the sources, apply the patches, register DDTREE and longleaf_mla.

    Sources and patches come first, so that a drift leaves SGLang untouched. SGLang logs what a
    plugin raises and goes on without it: under the launcher the process ends with status 2, after
    one line that says why; SystemExit is not caught by the loader.
    """
    try:
        registered()
    except Exception as error:
        if os.environ.get(GUARD_VARIABLE) != "1":
            raise
        sentence = str(error) if isinstance(error, DriftError) else _describe(error)
        print(f"longleaf engine: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from error


def registered() -> Registration:
    """Register everything, and return what SGLang then finds under the names."""
    from longleaf.engine import guard, hooks

    guard.check_versions()
    guard.check_sources()
    patches = hooks.register()
    from longleaf.engine import algorithm, backend

    backend.register()
    algorithm.register()
    found_algorithm, found_backend = guard.check_registrations()
    return Registration(found_algorithm, found_backend, tuple(patch.number for patch in patches))


def _describe(error: Exception) -> str:
    kind = type(error).__name__
    return f"the plugin cannot be registered ({kind}: {error}); fix: reinstall longleaf and sglang"
