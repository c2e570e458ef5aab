"""The numbered patches of SGLang, for what its plugin hooks cannot reach.

A patch belongs to one version of one file: it applies only while that file's SHA-256 is the one
it was written against, so nothing but a version change undoes it. `apply_all` checks every patch
before the first one is applied; a drift therefore leaves SGLang untouched.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from longleaf.engine.drift import DriftError, source_sha256
from longleaf.engine.pins import SGLANG_VERSION


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of SGLang in memory.

    number: place in the order of application, and in the module's name ``pNNN_name``.
    why: one sentence: what SGLang does, and why no hook reaches it.
    module: dotted name of the SGLang module that changes; sha256: of that module's file.
    apply: makes the change; called once a process; may be called again without effect.
    """

    number: int
    name: str
    why: str
    module: str
    sha256: str
    apply: Callable[[], None]


def load_patches() -> tuple[Patch, ...]:
    """Return the attribute ``PATCH`` of every module ``pNNN_name`` of this package, in order.

    Raises ValueError where a number is taken twice or disagrees with its module's name.
    """
    patches: list[Patch] = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda item: item.name):
        if not info.name[1:4].isdigit():
            continue
        patch: Patch = importlib.import_module(f"{__name__}.{info.name}").PATCH
        if info.name != f"p{patch.number:03d}_{patch.name}":
            raise ValueError(
                f"patch {patch.number} {patch.name} must be in the module "
                f"p{patch.number:03d}_{patch.name}, not in {info.name}"
            )
        patches.append(patch)
    numbers = [patch.number for patch in patches]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"every patch needs a number of its own, got {numbers}")
    return tuple(patches)


def check_patches(patches: Iterable[Patch]) -> None:
    """Raise DriftError for the first patch whose file is not the one it was written against."""
    for patch in patches:
        found = source_sha256(patch.module)
        if found != patch.sha256:
            raise DriftError(
                f"patch {patch.number} ({patch.name}) expects {patch.module} of SGLang "
                f"{SGLANG_VERSION} (sha256 {patch.sha256[:12]}…), found {found[:12]}…",
                f"install sglang=={SGLANG_VERSION} unmodified",
            )


def apply_all(patches: Iterable[Patch] | None = None) -> tuple[Patch, ...]:
    """Check every patch, then apply them by number; returns them. None takes all there are."""
    chosen = sorted(load_patches() if patches is None else patches, key=lambda item: item.number)
    check_patches(chosen)
    for patch in chosen:
        patch.apply()
    return tuple(chosen)
