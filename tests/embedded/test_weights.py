"""Reading checkpoints: dtypes, and complaints that name the tensor."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longleaf.embedded.config import DrafterConfig, TargetConfig
from longleaf.embedded.drafter import Drafter
from longleaf.embedded.target import Target
from longleaf.embedded.weights import Weights, WeightsError
from tests.embedded.small_models import small_pair, write

PAIR = small_pair()
CONFIG = TargetConfig.parse(PAIR.target_config, "small")
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def write_raw(folder: Path, name: str, dtype: str, shape: list[int], data: bytes) -> Path:
    """One tensor in the file format itself (numpy knows no bf16)."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return folder


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 3.140625], [0.0, -65536.0, 2.0**-126]], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert (values.view(np.uint32) & 0xFFFF == 0).all()
    weights = Weights.load(write_raw(tmp_path, "w", "BF16", [2, 3], halves.tobytes()))
    taken = weights.take("w", 2, 3)
    assert taken.dtype == np.float32
    np.testing.assert_array_equal(taken, values)
    weights.finish()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_floats_are_read_as_they_are(tmp_path: Path, dtype: type) -> None:
    values: npt.NDArray[Any] = np.array([1.5, -0.25, 1e-4], dtype)
    taken = Weights.load(write({"w": values}, tmp_path)).take("w", 3)
    assert taken.dtype == np.float32
    np.testing.assert_array_equal(taken, values.astype(np.float32))


def test_a_tensor_is_handed_out_once() -> None:
    weights = Weights({"w": np.zeros(3, np.float32)}, "file")
    weights.take("w", 3)
    with pytest.raises(WeightsError, match=r"file: w is missing, expected \[3\]"):
        weights.take("w", 3)


def test_a_missing_tensor_is_named() -> None:
    tensors = {k: v for k, v in PAIR.target.items() if k != EXPERT}
    with pytest.raises(WeightsError, match=rf"file: {EXPERT} is missing, expected \[12, 24\]"):
        Target(CONFIG, Weights(tensors, "file"))


def test_a_misshaped_tensor_is_named() -> None:
    tensors = PAIR.target | {EXPERT: np.zeros((12, 25), np.float32)}
    with pytest.raises(WeightsError, match=rf"{EXPERT} is \[12, 25\], expected \[12, 24\]"):
        Target(CONFIG, Weights(tensors, "file"))


def test_an_extra_tensor_is_named() -> None:
    extra = {"model.layers.4.mlp.gate.weight": np.zeros((2, 2), np.float32)}
    complaint = r"model.layers.4.mlp.gate.weight \[2, 2\] is unexpected"
    with pytest.raises(WeightsError, match=complaint):
        Target(CONFIG, Weights(PAIR.target | extra, "file"))


def test_a_drafters_fc_must_fit_its_taps() -> None:
    target = Target(CONFIG, Weights(PAIR.target, "file"), (0, 2))
    config = DrafterConfig.parse(PAIR.drafter_config, "small")
    tensors = PAIR.drafter | {"fc.weight": np.zeros((24, 72), np.float32)}
    with pytest.raises(WeightsError, match=r"fc.weight is \[24, 72\], expected \[24, 48\]"):
        Drafter(config, Weights(tensors, "file"), target)
    with pytest.raises(WeightsError, match=r"layers.3.extra \[1\] is unexpected"):
        Drafter(
            config, Weights(PAIR.drafter | {"layers.3.extra": np.zeros(1, np.float32)}, "f"), target
        )


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="w is I32, expected BF16, F16 or F32"):
        Weights.load(write({"w": np.zeros(3, np.int32)}, tmp_path))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors: no such file"):
        Weights.load(tmp_path)
    path = write({"w": np.zeros(300, np.float32)}, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        Weights.load(tmp_path)


def test_a_pair_on_disk_is_loaded(tmp_path: Path) -> None:
    folders = []
    for name, config, tensors in (
        ("target", PAIR.target_config, PAIR.target),
        ("drafter", PAIR.drafter_config, PAIR.drafter),
    ):
        folders.append(write(tensors, tmp_path / name))
        (folders[-1] / "config.json").write_text(json.dumps(config))
    target = Target.load(folders[0], (0, 2))
    assert target.config == CONFIG
    tokens = np.array([3, 60])
    np.testing.assert_array_equal(
        target.embed(tokens), PAIR.target["model.embed_tokens.weight"][tokens]
    )
    assert Drafter.load(folders[1], target).config.taps == (0, 2)
