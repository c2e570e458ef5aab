"""Names the GPU and its driver for the results file."""

import subprocess
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """Marketing name, driver version, and the short name of its results files."""

    name: str
    driver: str | None

    @property
    def slug(self) -> str:
        """NVIDIA H200 -> h200; NVIDIA RTX PRO 6000 Blackwell … -> rtx-pro-6000."""
        words = self.name.lower().removeprefix("nvidia ").split()
        kept: list[str] = []
        for word in words:
            kept.append(word)
            if any(character.isdigit() for character in word):
                break
        return "-".join(kept)


def describe_gpu() -> Gpu:
    """The current CUDA device."""
    name: str = torch.cuda.get_device_name()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return Gpu(name, None)
    lines = done.stdout.split()
    return Gpu(name, lines[0] if lines else None)
