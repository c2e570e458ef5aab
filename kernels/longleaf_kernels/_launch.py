"""Where operators get the library and the stream to launch on."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from longleaf_kernels._library import Library, library


@contextmanager
def launching(device: torch.device) -> Iterator[tuple[Library, int]]:
    """Yield the library, checked against the GPU, and the current stream's handle."""
    loaded = _library_for(device)
    with torch.cuda.device(device):
        yield loaded, torch.cuda.current_stream(device).cuda_stream


@cache
def _library_for(device: torch.device) -> Library:
    """Return the library once it is known to hold code for the device: asked at every launch."""
    capability = torch.cuda.get_device_capability(device)  # says it first if there is no GPU
    loaded = library()
    loaded.check_device(capability)
    return loaded
