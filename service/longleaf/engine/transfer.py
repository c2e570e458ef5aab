"""Host numbers to the device, without the host waiting for what the device is at."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(parts: Sequence[NDArray[np.int64]], device: torch.device | str) -> Tensor:
    """Return the parts one after another, int64, by one copy that the host does not wait for."""
    pinned = torch.device(device).type == "cuda"
    host = torch.empty(sum(map(len, parts)), dtype=torch.int64, pin_memory=pinned)
    np.concatenate(parts, out=host.numpy())
    return host.to(device, non_blocking=True)
