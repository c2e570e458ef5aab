"""The checks that stand before a start. Each raises DriftError: one sentence, and the fix."""

import importlib
import inspect
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from longleaf.engine import pins
from longleaf.engine.drift import DriftError, signature, source_sha256

_REINSTALL = f"pip install --force-reinstall --no-deps sglang=={pins.SGLANG_VERSION}"


def check_versions(installed: Mapping[str, str] | None = None) -> None:
    """Check the installed SGLang; ``installed`` maps names to versions, None asks the metadata."""
    try:
        found = version("sglang") if installed is None else installed["sglang"]
    except (PackageNotFoundError, KeyError):
        raise DriftError(
            "SGLang is not installed", f"install sglang=={pins.SGLANG_VERSION}"
        ) from None
    if found != pins.SGLANG_VERSION:
        raise DriftError(
            f"the plugin was written against SGLang {pins.SGLANG_VERSION}, found {found}",
            f"install sglang=={pins.SGLANG_VERSION}",
        )


def check_platform(torch_version: str, cuda_version: str | None) -> None:
    """Check torch's release line and its CUDA, as `torch.__version__`, `torch.version.cuda`."""
    if torch_version.split("+")[0].rsplit(".", 1)[0] != pins.TORCH_RELEASE:
        raise DriftError(
            f"the engine needs torch {pins.TORCH_RELEASE}, found {torch_version}",
            f"install torch=={pins.TORCH_RELEASE}.*",
        )
    if cuda_version is None or int(cuda_version.split(".")[0]) != pins.CUDA_MAJOR:
        found = "none" if cuda_version is None else cuda_version
        raise DriftError(
            f"the engine needs torch built for CUDA {pins.CUDA_MAJOR}, found CUDA {found}",
            f"install torch=={pins.TORCH_RELEASE}.*+cu{pins.CUDA_MAJOR}0",
        )


def check_kernels() -> None:
    """Check that our kernels' package has the pinned ABI and that its library loads."""
    try:
        library = importlib.import_module("longleaf_kernels._library")
    except ImportError as error:
        raise DriftError(
            f"longleaf_kernels cannot be imported ({error})",
            "install it, or set PYTHONPATH=kernels",
        ) from error
    if library.ABI_VERSION != pins.KERNELS_ABI_VERSION:
        raise DriftError(
            f"the engine needs longleaf_kernels of ABI version {pins.KERNELS_ABI_VERSION}, "
            f"found {library.ABI_VERSION}",
            "install kernels and service of one commit",
        )
    try:
        library.library()
    except library.KernelLibraryError as error:
        raise DriftError(str(error).rstrip("."), "make kernels") from error


def check_sources(sources: Mapping[str, str] = pins.SOURCES) -> None:
    """Check that every file relied on is byte for byte the one the plugin was written against."""
    for module, expected in sources.items():
        found = source_sha256(module)
        if found != expected:
            raise DriftError(
                f"{module} differs from SGLang {pins.SGLANG_VERSION}'s "
                f"(sha256 {found[:12]}…, expected {expected[:12]}…)",
                _REINSTALL,
            )


def check_signatures(signatures: Mapping[str, Mapping[str, str]] = pins.SIGNATURES) -> None:
    """Check the parameters of every function relied on, as they are in memory now."""
    for module, functions in signatures.items():
        found_module = importlib.import_module(module)
        for name, expected in functions.items():
            found: object = found_module
            for part in name.split("."):
                found = getattr(found, part, None)
            if not callable(found):
                raise DriftError(f"{module} has no function {name}", _REINSTALL)
            takes = signature(inspect.unwrap(found))
            if takes != expected:
                raise DriftError(f"{module}.{name} takes {takes}, expected {expected}", _REINSTALL)


def check_plugin_installed() -> None:
    """Check that SGLang's loader finds the plugin and is allowed to load it."""
    group = entry_points(group="sglang.srt.plugins")
    if "longleaf" not in group.names:
        raise DriftError(
            "SGLang finds no plugin longleaf in the entry points sglang.srt.plugins",
            "pip install the longleaf service into SGLang's environment",
        )
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if any(allowed) and "longleaf" not in allowed:
        raise DriftError(
            f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves longleaf out",
            "add longleaf to it, or unset it",
        )


def check_registrations() -> tuple[type, type]:
    """Check by class that DDTREE and longleaf_mla are ours; returns both classes."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
    from sglang.srt.speculative.spec_registry import get_spec

    from longleaf.engine import algorithm, backend

    fix = "remove other SGLang plugins"
    found = get_spec(algorithm.NAME)
    if not isinstance(found, algorithm.DDTreeAlgorithm):
        raise DriftError(f"SGLang's algorithm {algorithm.NAME} is {found!r}, not ours", fix)
    if ATTENTION_BACKENDS.get(backend.NAME) is not backend.create:
        raise DriftError(
            f"SGLang's attention backend {backend.NAME} is "
            f"{ATTENTION_BACKENDS.get(backend.NAME)!r}, not ours",
            fix,
        )
    if backend.NAME not in ATTENTION_BACKEND_CHOICES:
        raise DriftError(f"SGLang does not offer --attention-backend {backend.NAME}", fix)
    return type(found), backend.LongleafMlaBackend
