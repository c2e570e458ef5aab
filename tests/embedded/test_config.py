"""Model configs: what is read, and that each bad value is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from longleaf.embedded.config import ConfigError, DrafterConfig, TargetConfig
from tests.embedded.small_models import DRAFTER, TARGET


def without(values: dict[str, Any], field: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != field}


def test_a_target_is_read() -> None:
    config = TargetConfig.parse(TARGET, "here")
    assert (config.num_layers, config.num_heads, config.latent_width) == (4, 3, 28)
    assert (config.qk_head_dim, config.rope_theta, config.rope_interleave) == (14, 300.0, True)
    assert (config.num_experts, config.experts_per_token, config.num_shared_experts) == (5, 2, 2)
    assert [config.is_moe(i) for i in range(4)] == [False, True, True, True]
    assert config.eos_token_ids == (0, 5)


def test_a_target_without_experts_is_dense() -> None:
    for changes in ({"n_routed_experts": None}, {"first_k_dense_replace": 4}):
        config = TargetConfig.parse(TARGET | changes, "here")
        assert not any(config.is_moe(i) for i in range(4))


def test_rope_parameters_of_newer_writers_are_read() -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    assert TargetConfig.parse(without(TARGET, "rope_theta") | plain, "here").rope_theta == 77.0
    merged = {"rope_parameters": DRAFTER["rope_scaling"] | {"rope_theta": 78.0}}
    values = without(without(DRAFTER, "rope_theta"), "rope_scaling") | merged
    config = DrafterConfig.parse(values, "here")
    assert config.rope_theta == 78.0
    assert config.yarn == DrafterConfig.parse(DRAFTER, "here").yarn


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "here: hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank must be an integer, got '512'"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer, got True"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
        ({"rope_theta": float("inf")}, "rope_theta must be positive and finite"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be positive and finite, got 0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling 'linear' is not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"q_lora_rank": 64}, "q_lora_rank is 64: only a plain q_proj"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"n_group": 2}, "n_group is 2: grouped routing is not supported"),
        ({"n_group": None}, "n_group is missing"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, over 5 experts"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [0, 61]}, "eos_token_id must lie in 0..60, got 61"),
        ({"eos_token_id": []}, "eos_token_id must not be empty"),
        ({"bos_token_id": None}, "bos_token_id must hold integers"),
    ],
)
def test_a_bad_target_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TargetConfig.parse(TARGET | changes, "here")


def test_a_drafter_is_read() -> None:
    config = DrafterConfig.parse(DRAFTER, "here")
    assert (config.taps, config.mask_token_id, config.block_size) == ((0, 2), 1, 5)
    assert config.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert config.sliding_window == 16
    assert config.yarn is not None
    assert (config.yarn.factor, config.yarn.original_max_positions) == (4.0, 64)


def test_a_drafter_without_layer_types_is_full() -> None:
    config = DrafterConfig.parse(without(DRAFTER, "layer_types"), "here")
    assert config.layer_types == ("full_attention",) * 3
    assert config.sliding_window == 0


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": DRAFTER["rope_scaling"] | changes}


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": DRAFTER["dflash_config"] | changes}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dflash_config": None}, "here: dflash_config must be an object"),
        (dflash(target_layer_ids=[0, 3]), r"target_layer_ids must name layers 0..2 of the 4"),
        (dflash(target_layer_ids=[0, 9]), r"target_layer_ids must lie in 0..3, got 9"),
        (dflash(target_layer_ids=[2, 0]), "target_layer_ids must rise strictly"),
        (dflash(target_layer_ids=[]), "target_layer_ids must not be empty"),
        (dflash(mask_token_id=61), "mask_token_id must be under vocab_size 61, got 61"),
        (dflash(mask_token_id=None), "mask_token_id is missing"),
        ({"block_size": 1}, "block_size must be at least 2, got 1"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"sliding_window": None}, "sliding_window is missing"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must list one type for each of 3 layers",
        ),
        ({"layer_types": ["full_attention", "x", "full_attention"]}, "layer_types .* got 'x'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is no multiple of 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"is_causal": True}, "is_causal is True"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is False"),
        (yarn(rope_type="longrope"), "rope_type 'longrope' is not supported"),
        (yarn(factor=0.5), "rope_scaling: factor must be at least 1, got 0.5"),
        (yarn(beta_fast=1.0), "beta_fast must be over beta_slow"),
        (yarn(mscale=1.0), "mscale is 1.0"),
        (
            yarn(original_max_position_embeddings=None),
            "original_max_position_embeddings is missing",
        ),
    ],
)
def test_a_bad_drafter_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DrafterConfig.parse(DRAFTER | changes, "here")


def test_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        TargetConfig.load(tmp_path)
    path = tmp_path / "config.json"
    for text, complaint in (("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            DrafterConfig.load(tmp_path)
    path.write_text(json.dumps(TARGET | {"hidden_size": -1}))
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size must be at least 1"):
        TargetConfig.load(tmp_path)
