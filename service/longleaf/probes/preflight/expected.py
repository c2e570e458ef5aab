"""What the engine will need, as its arguments say."""

import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "k": 1000, "Ki": 1 << 10, "M": 10**6, "Mi": 1 << 20}
_UNITS |= {"G": 10**9, "Gi": 1 << 30, "T": 10**12, "Ti": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes of a quantity as Kubernetes writes it (32Gi); ``ValueError``."""
    found = re.fullmatch(r"([0-9]+)(|k|Ki|M|Mi|G|Gi|T|Ti)", text)
    if found is None:
        raise ValueError(f"{text!r} is no quantity such as 32Gi")
    return int(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is held against the facts; None and empty where nothing is asked.

    shared_memory: bytes; memory_fraction: share of a GPU's free memory that the engine takes.
    """

    gpus: int = 8
    products: tuple[str, ...] = ()
    compute_majors: tuple[int, ...] = ()
    minimum_driver: str | None = None
    shared_memory: int | None = None
    target: Path | None = None
    drafter: Path | None = None
    block_size: int | None = None
    nodes: int | None = None
    draft_window: int | None = None
    context_length: int | None = None
    kv_pool_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    memory_fraction: float = 0.9
    kernel_seconds: float = 300.0
    nccl_seconds: float = 120.0
