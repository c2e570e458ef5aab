"""Finds and loads the compiled library, and says clearly when it cannot serve here."""

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

ABI_VERSION = 3
PATH_VARIABLE = "LONGLEAF_KERNELS_LIBRARY"
OK, BAD_ARGUMENT, NOT_BUILT = 0, -1, -2


class KernelLibraryError(RuntimeError):
    """The compiled library is missing, of another version, or not built for this GPU."""


class KernelError(RuntimeError):
    """A launch was refused or failed; the message holds the library's own words."""


class Library:
    """The C functions of one loaded library file.

    Each launching function returns a status; `check` turns one into an exception.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelLibraryError(f"cannot load {path}: {error}") from error
        try:
            version = int(self._functions.longleaf_abi_version())
        except AttributeError as error:
            raise KernelLibraryError(f"{path} is not a longleaf_kernels library") from error
        if version != ABI_VERSION:
            raise KernelLibraryError(
                f"{path} has ABI version {version}, this package needs {ABI_VERSION}: rebuild it"
            )
        self.path = path
        self._functions.longleaf_cuda_archs.restype = ctypes.c_char_p
        self._functions.longleaf_error_string.restype = ctypes.c_char_p
        self.archs: tuple[str, ...] = tuple(
            self._functions.longleaf_cuda_archs().decode().split(";")
        )

    def function(
        self, name: str, *argument_types: type, returns: type = ctypes.c_int
    ) -> Callable[..., int]:
        """Return the C function `name` with its types set; what it returns is a status or size."""
        function = getattr(self._functions, name)
        function.argtypes = argument_types
        function.restype = returns
        return function  # type: ignore[no-any-return]

    def check(self, status: int, operator: str) -> None:
        """Raise KernelError unless the status of a launch of `operator` is success."""
        if status != OK:
            message = self._functions.longleaf_error_string(status).decode()
            raise KernelError(f"{operator}: {message} (status {status})")

    def check_device(self, capability: tuple[int, int]) -> None:
        """Raise KernelLibraryError unless the library holds code for this compute capability."""
        if not any(_runs_on(arch, capability) for arch in self.archs):
            major, minor = capability
            raise KernelLibraryError(
                f"this GPU is sm_{major}{minor} and {self.path.name} was built for "
                f"{', '.join(f'sm_{arch}' for arch in self.archs)}: rebuild with "
                f'LONGLEAF_CUDA_ARCHS="{major}{minor}a"'
            )


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether machine code for `arch` (90a, 120f, 100) runs on a compute capability."""
    match = re.fullmatch(r"(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def library_path() -> Path:
    """Return where the library is: $LONGLEAF_KERNELS_LIBRARY, or beside this package."""
    chosen = os.environ.get(PATH_VARIABLE)
    path = Path(chosen) if chosen else Path(__file__).parent / "lib" / "liblongleaf_kernels.so"
    if not path.is_file():
        reason = f"{PATH_VARIABLE} names" if chosen else "the package was installed without"
        raise KernelLibraryError(
            f"{reason} {path}, which does not exist. Build it on a machine with nvcc, no GPU "
            "needed: `pip install ./kernels`, or `make kernels` in a checkout."
        )
    return path


@cache
def library() -> Library:
    """Return the library of this process, loaded on first use."""
    return Library(library_path())
