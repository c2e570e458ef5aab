"""Safetensors checkpoints as float32 numpy arrays, with every shape checked by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

F32 = npt.NDArray[np.float32]


class WeightsError(ValueError):
    """A checkpoint's tensor is missing, unexpected, misshaped or of an unsupported dtype."""


class Weights:
    """Named tensors of one checkpoint, handed out once each.

    ``take`` checks the shape; ``finish`` complains about tensors that nobody asked for.
    """

    def __init__(self, tensors: Mapping[str, F32], source: str) -> None:
        self._left = dict(tensors)
        self._source = source

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read ``directory/model.safetensors`` (bf16, fp16 or fp32), widened to float32.

        Raises:
            WeightsError: The file is missing, cut short, or holds another dtype.
        """
        path = directory / "model.safetensors"
        try:
            found = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except FileNotFoundError:
            raise WeightsError(f"{path}: no such file") from None
        except SafetensorError as error:
            raise WeightsError(f"{path}: {error}") from None
        return cls({name: _widen(path, name, info) for name, info in found}, str(path))

    def take(self, name: str, *shape: int) -> F32:
        """The tensor ``name``, float32 of exactly ``shape``."""
        tensor = self._left.pop(name, None)
        expected = f"expected {list(shape)}"
        if tensor is None:
            raise WeightsError(f"{self._source}: {name} is missing, {expected}")
        if tensor.shape != shape:
            raise WeightsError(f"{self._source}: {name} is {list(tensor.shape)}, {expected}")
        return tensor

    def finish(self) -> None:
        """Raise WeightsError if tensors are left that the config does not call for."""
        if self._left:
            name, tensor = next(iter(self._left.items()))
            raise WeightsError(
                f"{self._source}: {name} {list(tensor.shape)} is unexpected: the config has no"
                f" place for it ({len(self._left)} such)"
            )


def _widen(path: Path, name: str, info: Mapping[str, object]) -> F32:
    data, dtype, shape = info["data"], info["dtype"], info["shape"]
    assert isinstance(data, (bytes, bytearray))
    assert isinstance(shape, list)
    if dtype == "BF16":
        wide = np.frombuffer(data, np.uint16).astype(np.uint32)
        return np.left_shift(wide, 16, out=wide).view(np.float32).reshape(shape)
    if dtype in ("F16", "F32"):
        narrow = np.frombuffer(data, np.float16 if dtype == "F16" else np.float32)
        return narrow.astype(np.float32).reshape(shape)
    raise WeightsError(f"{path}: {name} is {dtype}, expected BF16, F16 or F32")
