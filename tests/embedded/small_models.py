"""Small models with random weights and odd shapes, for tests that need no trained weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

F32 = npt.NDArray[np.float32]

TARGET: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_theta": 300.0,
    "rope_interleave": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [0, 5],
}

DRAFTER: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_target_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "block_size": 5,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 1},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "rope_theta": 300.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
    },
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
}


def target_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a target checkpoint and its shape, from the names of Hugging Face's model."""
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            p + "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            p + "self_attn.kv_a_layernorm.weight": (rank,),
            p + "self_attn.kv_b_proj.weight": (heads * (nope + v), rank),
            p + "self_attn.o_proj.weight": (hidden, heads * v),
        }
        if i < c["first_k_dense_replace"]:
            shapes |= _ffn(p + "mlp.", hidden, c["intermediate_size"])
            continue
        shapes[p + "mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        shapes[p + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        width = c["moe_intermediate_size"]
        for e in range(c["n_routed_experts"]):
            shapes |= _ffn(p + f"mlp.experts.{e}.", hidden, width)
        shapes |= _ffn(p + "mlp.shared_experts.", hidden, width * c["n_shared_experts"])
    return shapes


def drafter_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter checkpoint and its shape."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    taps = len(c["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (heads * dim, hidden),
            p + "self_attn.k_proj.weight": (kv_heads * dim, hidden),
            p + "self_attn.v_proj.weight": (kv_heads * dim, hidden),
            p + "self_attn.o_proj.weight": (hidden, heads * dim),
            p + "self_attn.q_norm.weight": (dim,),
            p + "self_attn.k_norm.weight": (dim,),
            **_ffn(p + "mlp.", hidden, c["intermediate_size"]),
        }
    return shapes


def _ffn(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, F32]:
    """Weights of a size that keeps every part of the model at work."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, F32] = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        if "norm" in name:
            drawn = 1 + 0.2 * drawn
        elif name.endswith("e_score_correction_bias"):
            drawn *= 0.3
        else:
            drawn *= 1.2 / np.sqrt(shape[-1])
        tensors[name] = drawn.astype(np.float32)
    return tensors


@dataclass(frozen=True)
class SmallPair:
    """Configs and tensors of a small target and its drafter."""

    target_config: dict[str, Any]
    drafter_config: dict[str, Any]
    target: dict[str, F32]
    drafter: dict[str, F32]


def small_pair(**changes: Any) -> SmallPair:
    """Random weights. ``changes`` with a ``draft_`` prefix go to the drafter's config."""
    ours = {k: v for k, v in changes.items() if not k.startswith("draft_")}
    theirs = {k.removeprefix("draft_"): v for k, v in changes.items() if k.startswith("draft_")}
    target, drafter = TARGET | ours, DRAFTER | theirs
    return SmallPair(
        target,
        drafter,
        random_tensors(target_shapes(target), seed=7),
        random_tensors(drafter_shapes(drafter), seed=8),
    )


def write(tensors: dict[str, Any], folder: Path) -> Path:
    """Write ``model.safetensors``."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder
