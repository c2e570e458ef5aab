"""Stand-ins for the compiled packages that SGLang imports and that no CPU wheel offers.

They let the real SGLang 0.5.17 be imported, parsed and patched without a GPU. Nothing in them
computes: a name looked up in a stub is a class that can be subclassed, called as a decorator or
registered, and no more. Whatever needs a kernel is tested under tests/gpu.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STUBBED = ("sgl_kernel", "torchvision", "flashinfer", "torchao", "soundfile", "IPython")


class _StubClass(type):
    """Class of the stubs' classes: a public attribute that is looked up is another one."""

    def __getattr__(cls, name: str) -> Any:
        return _empty_class(cls, name, cls.__module__)


class StubModule(ModuleType):
    """A module in which every public name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        return _empty_class(self, name, self.__name__)


def _empty_class(owner: object, name: str, module: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    value = _StubClass(name, (), {"__module__": module, "__init__": _accept_anything})
    setattr(owner, name, value)
    return value


def _accept_anything(self: object, *args: object, **kwargs: object) -> None:
    del self, args, kwargs


class StubFinder(MetaPathFinder, Loader):
    """Finds the stubbed packages and everything below them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.setdefault("__version__", "0.0.0")


def install() -> None:
    """Put the stubs before the real import machinery; twice is once."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StubFinder())
