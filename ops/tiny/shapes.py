"""Shapes of the tiny target and its drafter, and the config files that describe them."""

from dataclasses import dataclass, field
from typing import Any

VOCAB = 4096
BLOCK = 8  # anchor + 7 masks
ENDOFTEXT, MASK, USER, ASSISTANT, SYSTEM, END, PAD, RESERVED = range(8)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|mask|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
    "<|r1|>",
)


@dataclass(frozen=True)
class TargetShape:
    """A small DeepSeek-V3: MLA with the kernels' real latent sizes, sigmoid-routed MoE."""

    hidden: int = 192
    layers: int = 4
    heads: int = 8
    nope: int = 32
    rope: int = 64
    value: int = 32
    kv_lora: int = 512
    dense_ffn: int = 512
    experts: int = 8
    experts_per_token: int = 2
    expert_ffn: int = 96
    routed_scale: float = 1.5
    rope_theta: float = 50000.0
    max_positions: int = 20480
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """config.json in the format of HF's DeepseekV3ForCausalLM."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_ffn,
            "moe_intermediate_size": self.expert_ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "routed_scaling_factor": self.routed_scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "kv_lora_rank": self.kv_lora,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "rope_theta": self.rope_theta,
            "rope_interleave": True,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": ENDOFTEXT,
            "eos_token_id": [ENDOFTEXT, END],
            "pad_token_id": PAD,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class DrafterShape:
    """A plain DFlash drafter: features of the target's taps injected as K/V of every layer."""

    hidden: int = 192
    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention")
    window: int = 256  # a windowed layer sees positions q - window + 1 .. q
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 448
    taps: tuple[int, ...] = (0, 1, 2)  # outputs of these target layers
    target_layers: int = 4
    rope_theta: float = 50000.0
    yarn: dict[str, float] = field(
        default_factory=lambda: {
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    )
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """config.json in the format that SGLang's DFlashDraftModel reads."""
        positions = int(self.yarn["factor"] * self.yarn["original_max_position_embeddings"])
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": len(self.layer_types),
            "num_target_layers": self.target_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": BLOCK,
            "dflash_config": {
                "target_layer_ids": list(self.taps),
                "mask_token": SPECIAL_TOKENS[MASK],
                "mask_token_id": MASK,
            },
            "layer_types": list(self.layer_types),
            "sliding_window": self.window,
            "use_sliding_window": True,
            "rope_theta": self.rope_theta,
            "rope_scaling": {"rope_type": "yarn", **self.yarn},
            "max_position_embeddings": positions,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "bos_token_id": ENDOFTEXT,
            "eos_token_id": [ENDOFTEXT, END],
            "pad_token_id": PAD,
            "torch_dtype": "bfloat16",
        }


CHAT_TEMPLATE = (
    "{{- '<|endoftext|>' -}}"
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- if role == 'developer' -%}{%- set role = 'system' -%}{%- endif -%}"
    "{%- if role not in ['user', 'assistant', 'system'] -%}{%- set role = 'user' -%}{%- endif -%}"
    "{{- '<|' + role + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

GENERATION_CONFIG = {
    "bos_token_id": ENDOFTEXT,
    "eos_token_id": [ENDOFTEXT, END],
    "pad_token_id": PAD,
    "do_sample": False,
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL_TOKENS[ENDOFTEXT],
    "eos_token": SPECIAL_TOKENS[END],
    "pad_token": SPECIAL_TOKENS[PAD],
    "mask_token": SPECIAL_TOKENS[MASK],
    "clean_up_tokenization_spaces": False,
    "model_max_length": TargetShape.max_positions,
    "chat_template": CHAT_TEMPLATE,
}
