"""Models without weights for SGLang's ``--load-format dummy``: real attention shapes, small rest.

The attention of one rank of eight of Kimi K2.6 (8 of 64 heads, kv_lora_rank 512, rope 64), its gate
(384 experts, sigmoid scores, one group) and its YaRN; a narrow hidden size and narrow experts, so
that weights fit anywhere and attention is what a step costs.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longleaf.embedded.load import DEFAULT_MODELS

TINY_TARGET = DEFAULT_MODELS / "tiny-target"
TINY_DRAFTER = DEFAULT_MODELS / "tiny-drafter"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyTarget:
    """Dimensions of a dummy target; the defaults are what ops/results/engine-h200.json measures."""

    layers: int = 61
    heads: int = 8
    hidden_size: int = 512
    experts: int = 384
    expert_size: int = 64
    context_length: int = 262_144

    def config(self) -> dict[str, Any]:
        """config.json of a DeepseekV3ForCausalLM, with the tiny target's vocabulary."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            "vocab_size": _vocabulary()["vocab_size"],
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "moe_intermediate_size": self.expert_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": self.hidden_size // 2,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.context_length,
            "rope_theta": 50_000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.context_length / 4096,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            **_vocabulary(),
        }

    def write(self, folder: Path) -> Path:
        """Write config.json, generation_config.json and the tokenizer; return the folder."""
        _write(folder, "config.json", self.config())
        _write(folder, "generation_config.json", {"bos_token_id": 0, "eos_token_id": [0, 5]})
        for name in _TOKENIZER_FILES:
            shutil.copyfile(TINY_TARGET / name, folder / name)
        return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyDrafter:
    """A DFlash drafter of a dummy target: Kimi's taps, block and window, full attention last."""

    target: DummyTarget
    layers: int = 2
    heads: int = 8
    kv_heads: int = 1
    block: int = 8
    window: int = 2048
    taps: tuple[int, ...] = (1, 12, 24, 35, 47, 58)

    def config(self) -> dict[str, Any]:
        """config.json of a DFlashDraftModel."""
        target = self.target
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "hidden_size": target.hidden_size,
            "intermediate_size": 2 * target.hidden_size,
            "num_hidden_layers": self.layers,
            "num_target_layers": target.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 50_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": target.context_length / 4096,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "max_position_embeddings": target.context_length,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "block_size": self.block,
            "layer_types": ["sliding_attention"] * (self.layers - 1) + ["full_attention"],
            "sliding_window": self.window,
            "use_sliding_window": True,
            "dflash_config": {
                "mask_token": "<|mask|>",
                "mask_token_id": 1,
                "target_layer_ids": list(self.taps),
            },
            **_vocabulary(),
        }

    def write(self, folder: Path) -> Path:
        """Write config.json; return the folder."""
        _write(folder, "config.json", self.config())
        return folder


def stretch_tiny_pair(folder: Path, context_length: int) -> tuple[Path, Path]:
    """Copy the tiny pair with positions up to ``context_length``; returns (target, drafter).

    The weights were trained for shorter contexts: what comes out is exact, not sensible.
    """
    target, drafter = folder / "target", folder / "drafter"
    for source, copy in ((TINY_TARGET, target), (TINY_DRAFTER, drafter)):
        shutil.copytree(source, copy, dirs_exist_ok=True)
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = context_length
        if "rope_scaling" in config:
            original = config["rope_scaling"]["original_max_position_embeddings"]
            config["rope_scaling"]["factor"] = context_length / original
        _write(copy, "config.json", config)
    return target, drafter


def _vocabulary() -> dict[str, Any]:
    config = json.loads((TINY_TARGET / "config.json").read_text())
    return {
        key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    }


def _write(folder: Path, name: str, document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(document, indent=1) + "\n")
