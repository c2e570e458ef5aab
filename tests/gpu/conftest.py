from pathlib import Path

import pytest

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Return why these tests cannot run here."""
    try:
        import torch
    except ImportError:
        return "needs torch"
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    from longleaf_kernels import KernelLibraryError
    from longleaf_kernels._library import library

    try:
        library().check_device(torch.cuda.get_device_capability())
    except KernelLibraryError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    reason = why_not() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
