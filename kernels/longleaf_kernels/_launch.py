"""Where operators get the library and the stream to launch on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longleaf_kernels._library import Library, library


@contextmanager
def launching(device: torch.device) -> Iterator[tuple[Library, int]]:
    """Yield the library, checked against the GPU, and the current stream's handle."""
    loaded = library()
    loaded.check_device(torch.cuda.get_device_capability(device))
    with torch.cuda.device(device):
        yield loaded, torch.cuda.current_stream(device).cuda_stream
