"""Configs that do not fit are refused, each with one sentence and a fix."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from longleaf.engine.drift import DriftError
from longleaf.engine.model_check import (
    Arguments,
    check_arguments,
    check_pair,
    check_target,
    read_config,
)
from tests.engine.conftest import MODELS


@pytest.fixture
def target() -> dict[str, Any]:
    return read_config(MODELS / "tiny-target", "target")


@pytest.fixture
def drafter() -> dict[str, Any]:
    return read_config(MODELS / "tiny-drafter", "drafter")


def test_the_tiny_pair_fits(target: dict[str, Any], drafter: dict[str, Any]) -> None:
    check_target(target)
    check_pair(target, drafter, Arguments(draft_tokens=64, block_size=8, draft_window=256))
    check_arguments(Arguments(page_size=1, kv_cache_dtype="fp8_e4m3"))


def test_the_k2_6_pair_fits() -> None:
    """The fields of Kimi K2.6 and of its published DFlash drafter."""
    target = {
        **{"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 262144},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    drafter = {
        **{"num_hidden_layers": 6, "hidden_size": 7168, "vocab_size": 163840, "block_size": 8},
        **{"layer_types": kinds, "sliding_window": 2048, "max_position_embeddings": 262144},
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 64.0},
            "original_max_position_embeddings": 4096,
        },
    }
    check_target(target)
    check_pair(target, drafter, Arguments(draft_tokens=32, context_length=200_000))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("vocab_size",), 4095, "drafter's vocab_size is 4095, the target's is 4096"),
        (("hidden_size",), 64, "drafter's hidden_size is 64, the target's is 192"),
        (("block_size",), None, "block_size is None"),
        (("num_target_layers",), 5, "num_target_layers is 5, the target has 4"),
        (("dflash_config", "target_layer_ids"), [0, 3], r"\[0, 3\], SGLang captures layers 0 to 2"),
        (("dflash_config", "target_layer_ids"), [-1, 2], r"\[-1, 2\]"),
        (
            ("dflash_config", "target_layer_ids"),
            [2, 0],
            r"\[2, 0\]: SGLang captures each layer once",
        ),
        (
            ("dflash_config", "target_layer_ids"),
            [0, 0],
            r"\[0, 0\]: SGLang captures each layer once",
        ),
        (("dflash_config", "mask_token_id"), None, "dflash_config has no mask_token_id"),
        (("dflash_config", "mask_token_id"), 4096, "outside the vocabulary of 4096"),
        (("sliding_window",), None, "sliding layers and sliding_window is None"),
        (("layer_types",), ["full_attention"], "2 layers and 1 layer_types"),
        (("rope_scaling", "factor"), None, "YaRN has factor None"),
        (("rope_scaling", "factor"), 4.0, "reaches 16384 positions .* is 32768"),
        (("max_position_embeddings",), 4096, "has 4096 positions, the context length is 20480"),
        (("block_size",), 64, "block_size is 64, the tree kernels take blocks of 2 to 16"),
        (("block_size",), True, "block_size is True"),
        (("dflash_config",), [1], r"dflash_config is \[1\], not an object"),
        (("dflash_config", "target_layer_ids"), "0,1", "target_layer_ids is '0,1', not a list of"),
        (("dflash_config", "target_layer_ids"), [0.5, 1], "not a list of whole numbers"),
        (("dflash_config", "mask_token_id"), "1", "mask_token_id is '1', not a whole number"),
        (("layer_types",), 3, "layer_types is 3, not a list of strings"),
        (("sliding_window",), True, "sliding_window is True"),
        (("rope_scaling",), "yarn", "rope_scaling is 'yarn', not an object"),
        (("rope_scaling", "factor"), "8", "YaRN has factor 8"),
        (("rope_scaling", "factor"), True, "YaRN has factor True"),
        (("max_position_embeddings",), "many", "max_position_embeddings is 'many', not a whole"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    target: dict[str, Any],
    drafter: dict[str, Any],
    path: tuple[str, ...],
    value: object,
    said: str,
) -> None:
    changed = copy.deepcopy(drafter)
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(DriftError, match=said) as caught:
        check_pair(target, changed, Arguments())
    assert "; fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Arguments(block_size=7), "block-size is 7, the drafter's block_size is 8"),
        (Arguments(draft_tokens=0), "num-draft-tokens is 0"),
        (Arguments(draft_tokens=129), "num-draft-tokens is 129, a tree has at most 128"),
        (Arguments(draft_window=128), "128, below the window of 256"),
        (Arguments(context_length=40_000), "32768 positions, the context length is 40000"),
    ],
)
def test_arguments_that_do_not_fit_the_drafter_are_refused(
    target: dict[str, Any], drafter: dict[str, Any], given: Arguments, said: str
) -> None:
    with pytest.raises(DriftError, match=said):
        check_pair(target, drafter, given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Arguments(page_size=64), "--page-size is 64"),
        (Arguments(context_length=0), "--context-length is 0"),
        (Arguments(kv_cache_dtype="fp8_e5m2"), "fp8_e5m2, the kernels read bf16 and fp8_e4m3"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: Arguments, said: str) -> None:
    with pytest.raises(DriftError, match=said):
        check_arguments(given)


def test_another_latent_shape_is_refused(target: dict[str, Any]) -> None:
    with pytest.raises(DriftError, match="kv_lora_rank 256 and qk_rope_head_dim 64"):
        check_target({**target, "kv_lora_rank": 256})
    with pytest.raises(DriftError, match="kv_lora_rank None"):
        check_target({"hidden_size": 8})
    with pytest.raises(DriftError, match="num_hidden_layers is '4', not a whole number"):
        check_target({**target, "num_hidden_layers": "4"})
    with pytest.raises(DriftError, match="num_attention_heads is 0, not at least 1"):
        check_target({**target, "num_attention_heads": 0})


def test_the_text_part_of_a_config_counts(tmp_path: Path) -> None:
    config = {"vocab_size": 1, "text_config": {"vocab_size": 2, "kv_lora_rank": 512}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path, "target")["vocab_size"] == 2
    with pytest.raises(DriftError, match=r"drafter.s .* cannot be read"):
        read_config(tmp_path / "gone", "drafter")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DriftError, match="no JSON object"):
        read_config(tmp_path, "target")
    (tmp_path / "config.json").write_text('{"text_config": [1]}')
    with pytest.raises(DriftError, match=r"target's text_config is \[1\], not an object"):
        read_config(tmp_path, "target")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DriftError, match=r"target's .* cannot be read"):
        read_config(tmp_path, "target")


YARN = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "place"),
    [
        ({"rope_parameters": YARN}, "rope_parameters"),
        ({"rope_scaling": None, "rope_parameters": YARN}, "rope_parameters"),
        (
            {"rope_parameters": {"sliding_attention": {}, "full_attention": YARN}},
            "rope_parameters.full_attention",
        ),
    ],
)
def test_rope_is_read_under_its_newer_name(
    target: dict[str, Any], drafter: dict[str, Any], rope: dict[str, Any], place: str
) -> None:
    del drafter["rope_scaling"]
    with pytest.raises(DriftError, match=r"reaches 16 positions .* is 32768") as caught:
        check_pair(target, {**drafter, **rope}, Arguments())
    assert caught.value.fix == f"correct {place} in the drafter's config.json"
    enough = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    check_pair(target, {**drafter, "rope_parameters": enough}, Arguments())
