"""Drift: anything that is not as the plugin was written against. Reading only, no sglang import."""

import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_CODE = 2
"""Exit status of a process that refuses to start because something has drifted."""

GUARD_VARIABLE = "LONGLEAF_ENGINE_GUARD"
"""Set to 1 by the launcher: a process in which the plugin fails then ends instead of going on."""


class DriftError(RuntimeError):
    """Something is not what the plugin was written against: one sentence, and what to do."""

    def __init__(self, sentence: str, fix: str) -> None:
        super().__init__(f"{sentence}; fix: {fix}")
        self.sentence = sentence
        self.fix = fix


def source_path(module: str) -> Path:
    """Return the file of a module, found below its top package without importing the module.

    Raises DriftError if there is none.
    """
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DriftError(f"{package} is not installed", f"install {package}")
    base = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    for path in (base.with_suffix(".py") if rest else base / "__init__.py", base / "__init__.py"):
        if path.is_file():
            return path
    raise DriftError(f"the module {module} does not exist", f"install the pinned {package}")


def source_sha256(module: str) -> str:
    """SHA-256 of a module's file, in hexadecimal."""
    return hashlib.sha256(source_path(module).read_bytes()).hexdigest()


def signature(function: Callable[..., Any]) -> str:
    """Names and kinds of a function's parameters, such as ``(self, bs, *, is_draft=)``.

    Annotations and the values of defaults are left out: a trailing ``=`` says that there is one.
    """
    parts: list[str] = []
    star = False
    for item in inspect.signature(function).parameters.values():
        if item.kind is item.VAR_POSITIONAL:
            star = True
        elif item.kind is item.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = "*" * (item.kind is item.VAR_POSITIONAL) + "**" * (item.kind is item.VAR_KEYWORD)
        default = "=" if item.default is not item.empty else ""
        parts.append(f"{prefix}{item.name}{default}")
    return f"({', '.join(parts)})"
