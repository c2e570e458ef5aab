"""Argument checks that run before any launch and name the argument and its limit."""

from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST_FLOAT32 = 2.0**-126
"""The smallest normal one: the kernels flush what is below."""
GREATEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


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
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtypes and (isinstance(dtypes, torch.dtype) or tensor.dtype not in dtypes):
        allowed = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
        names = " or ".join(_short(dtype) for dtype in allowed)
        raise TypeError(f"{name} must be {names}, got {_short(tensor.dtype)}")
    if not _fits(tensor.shape, shape):
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


def _fits(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(sizes) != len(shape):
        return False
    # A loop: this runs dozens of times a step, and a generator costs as much again.
    for size, wanted in zip(sizes, shape, strict=True):
        if not isinstance(wanted, str) and size != wanted:
            return False
    return True


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def check_integer(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an integer, perhaps a symbolic one."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def check_scale(name: str, value: float) -> None:
    """Raise unless `value` is a positive number that float32, the kernels' type, can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not SMALLEST_FLOAT32 <= value <= GREATEST_FLOAT32:  # false for NaN
        raise ValueError(f"{name} must be positive and finite in float32, got {value}")


def check_aligned(name: str, tensor: Tensor, alignment: int = 16) -> None:
    """Raise ValueError unless the tensor's data starts on `alignment` bytes."""
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name} must start on {alignment} bytes, got {tensor.data_ptr():#x}")


def check_no_grad(**tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor whose gradient is wanted: the operators have none."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name} requires grad, which the kernels do not give: detach it, or run "
                "under torch.no_grad()"
            )


def check_apart(written: dict[str, Tensor | None], read: dict[str, Tensor | None]) -> None:
    """Raise ValueError if memory that is written overlaps anything else. Contiguous tensors."""
    seen: list[tuple[str, int, int]] = []
    for name, tensor in (*read.items(), *written.items()):
        if tensor is None or tensor.numel() == 0:
            continue
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if name in written:
            for other, other_begin, other_end in seen:
                if begin < other_end and other_begin < end:
                    raise ValueError(f"{name} must not overlap {other} in memory")
        seen.append((name, begin, end))


def check_cuda(name: str, tensor: Tensor) -> torch.device:
    """Return the device of an operator's leading argument, a CUDA device or ValueError."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} must be on a CUDA device, got {tensor.device}")
    return tensor.device


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
