"""``longleaf preflight`` on this machine's own GPUs: driver, kernel and NCCL."""

import json
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

TRIED = (
    "gpu-count",
    "gpu-product",
    "compute-capability",
    "driver",
    "shared-memory",
    "kernel",
    "nccl",
)


def _run(*more: str) -> dict[str, Any]:
    """Result of each check."""
    count = torch.cuda.device_count()
    major, _ = torch.cuda.get_device_capability()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "longleaf", "preflight", "--json", f"--gpus={count}"),
            *(f"--compute-major={major}", "--minimum-driver=525", "--shared-memory=1Mi", *more),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    checks = json.loads(done.stdout)["checks"]
    failed = [one for one in checks if one["result"] == "failed"]
    assert done.returncode == (1 if failed else 0), done.stderr
    return {one["name"]: (one["result"], one["said"]) for one in checks}


def test_preflight_passes_here() -> None:
    found = _run(f"--product={torch.cuda.get_device_name()}")
    assert {name: found[name][0] for name in TRIED} == dict.fromkeys(TRIED, "passed"), found
    count = torch.cuda.device_count()
    assert f"right on {count} GPUs" in found["kernel"][1]
    assert f"right over {count} ranks" in found["nccl"][1]


def test_another_product_fails_alone() -> None:
    found = _run("--product=NVIDIA-Something-Else", "--skip=kernel", "--skip=nccl")
    assert [name for name, (result, _) in found.items() if result == "failed"] == ["gpu-product"]
