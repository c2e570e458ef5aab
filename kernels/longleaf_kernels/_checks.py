"""Argument checks that run before any launch and name the argument and its limit."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Raise ValueError or TypeError unless `tensor` is what an operator takes.

    shape: one entry a dimension, an exact size or the name of a free one. contiguous: whole
    tensor, or else the last dimension alone.
    """
    allowed = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    if tensor.dtype not in allowed:
        names = " or ".join(_short(dtype) for dtype in allowed)
        raise TypeError(f"{name} must be {names}, got {_short(tensor.dtype)}")
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
    if not contiguous and tensor.numel() > 0 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {list(tensor.stride())}"
        )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def check_cuda(name: str, tensor: Tensor) -> torch.device:
    """Return the device of an operator's leading argument, a CUDA device or ValueError."""
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} must be on a CUDA device, got {tensor.device}")
    return tensor.device


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
