"""Typed, validated ``config.json`` of the target and of its DFlash drafter."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from longleaf.embedded.fields import ConfigError, Fields, read_object

__all__ = ["ConfigError", "DrafterConfig", "LayerType", "TargetConfig", "YarnConfig"]

LayerType = Literal["sliding_attention", "full_attention"]
_LAYER_TYPES: tuple[LayerType, ...] = ("sliding_attention", "full_attention")


def _rope(fields: Fields) -> tuple[float, Fields | None]:
    """(theta, scaling or None). Newer writers keep both in one ``rope_parameters`` object."""
    parameters = fields.raw("rope_parameters")
    holder = fields.object("rope_parameters") if parameters is not None else fields
    theta = holder.number("rope_theta")
    if parameters is not None:
        scaling: Fields | None = holder
    else:
        scaling = fields.object("rope_scaling") if fields.raw("rope_scaling") is not None else None
    if scaling is not None and _rope_type(scaling) == "default":
        scaling = None
    return theta, scaling


def _rope_type(scaling: Fields) -> Any:
    return scaling.raw("rope_type", scaling.raw("type", "default"))


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Shape of a DeepSeek-V3-style target: MLA attention, a dense prefix of layers, then MoE.

    Names follow Hugging Face's ``DeepseekV3Config``. ``num_experts`` is 0 if every layer is dense.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    first_dense_layers: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rope_theta: float
    rope_interleave: bool
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_ids: tuple[int, ...]

    @property
    def latent_width(self) -> int:
        """Floats of one cached latent row: compressed KV, then the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has experts rather than one dense feed-forward."""
        return self.num_experts > 0 and layer >= self.first_dense_layers

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read ``directory/config.json``. Raises ConfigError naming the field and the limit."""
        path = directory / "config.json"
        return cls.parse(read_object(path), str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate one config object; ``source`` names it in errors."""
        f = Fields(values, source)
        f.only("q_lora_rank", None, "only a plain q_proj is supported (null)")
        f.only("attention_bias", False, "attention biases are not supported")
        f.only("hidden_act", "silu", "only silu is supported")
        f.only("quantization_config", None, "quantized weights are not supported")
        theta, scaling = _rope(f)
        if scaling is not None:
            raise f.error("rope_scaling", f"{_rope_type(scaling)!r} is not supported on the target")
        vocab = f.integer("vocab_size")
        layers = f.integer("num_hidden_layers")
        experts = f.integer("n_routed_experts", least=0, default=0)
        dense = f.integer("first_k_dense_replace", least=0, default=0)
        per_token = 0
        if experts and dense < layers:
            f.only("scoring_func", "sigmoid", "only sigmoid router scores are supported")
            f.only("topk_method", "noaux_tc", "only noaux_tc routing is supported")
            if (groups := f.integer("n_group")) != 1:
                raise f.error("n_group", f"is {groups}: grouped routing is not supported, use 1")
            f.only("moe_layer_freq", 1, "every layer after the dense ones must be MoE (1)")
            per_token = f.integer("num_experts_per_tok")
            if per_token > experts:
                raise f.error("num_experts_per_tok", f"is {per_token}, over {experts} experts")
        rope_dim = f.integer("qk_rope_head_dim", least=2)
        if rope_dim % 2:
            raise f.error("qk_rope_head_dim", f"must be even, got {rope_dim}")
        moe = experts > 0 and dense < layers
        return cls(
            vocab_size=vocab,
            hidden_size=f.integer("hidden_size"),
            num_layers=layers,
            num_heads=f.integer("num_attention_heads"),
            kv_lora_rank=f.integer("kv_lora_rank"),
            qk_nope_head_dim=f.integer("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=f.integer("v_head_dim"),
            intermediate_size=f.integer("intermediate_size"),
            moe_intermediate_size=f.integer("moe_intermediate_size") if moe else 0,
            num_experts=experts if moe else 0,
            num_shared_experts=f.integer("n_shared_experts", least=0, default=0) if moe else 0,
            experts_per_token=per_token,
            first_dense_layers=min(dense, layers) if moe else layers,
            norm_topk_prob=f.boolean("norm_topk_prob", default=True),
            routed_scaling_factor=f.number("routed_scaling_factor") if moe else 1.0,
            rope_theta=theta,
            rope_interleave=f.boolean("rope_interleave", default=True),
            max_positions=f.integer("max_position_embeddings"),
            rms_norm_eps=f.number("rms_norm_eps", default=1e-6),
            tie_word_embeddings=f.boolean("tie_word_embeddings", default=False),
            bos_token_id=f.integers("bos_token_id", vocab)[0],
            eos_token_ids=f.integers("eos_token_id", vocab),
        )


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN context extension (Peng et al. 2023, arXiv:2309.00071), as SGLang reads it."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """Factor on cos and sin (so its square multiplies the scores' rotary part)."""


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a DFlash drafter: Qwen3-style layers with the target's features injected as K/V."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_target_layers: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    rope_theta: float
    yarn: YarnConfig | None
    max_positions: int
    rms_norm_eps: float

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read ``directory/config.json``. Raises ConfigError naming the field and the limit."""
        path = directory / "config.json"
        return cls.parse(read_object(path), str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate one config object; ``source`` names it in errors."""
        f = Fields(values, source)
        f.only("attention_bias", False, "attention biases are not supported")
        f.only("hidden_act", "silu", "only silu is supported")
        f.only("is_causal", False, "full_attention layers of a drafter must not be causal")
        f.only("rope_is_neox_style", True, "only the half-split rotary layout is supported")
        f.only("quantization_config", None, "quantized weights are not supported")
        vocab = f.integer("vocab_size")
        layers = f.integer("num_hidden_layers")
        heads, kv_heads = f.integer("num_attention_heads"), f.integer("num_key_value_heads")
        if heads % kv_heads:
            raise f.error("num_attention_heads", f"({heads}) is no multiple of {kv_heads} KV heads")
        head_dim = f.integer("head_dim", least=2)
        if head_dim % 2:
            raise f.error("head_dim", f"must be even, got {head_dim}")
        target_layers = f.integer("num_target_layers")
        dflash = f.object("dflash_config")
        taps = dflash.integers("target_layer_ids", target_layers)
        # SGLang captures a tap when the next layer starts, so the last layer is never captured.
        if max(taps) > target_layers - 2:
            raise dflash.error(
                "target_layer_ids",
                f"must name layers 0..{target_layers - 2} of the {target_layers}, got {list(taps)}",
            )
        if list(taps) != sorted(set(taps)):
            raise dflash.error("target_layer_ids", f"must rise strictly, got {list(taps)}")
        mask = dflash.integer("mask_token_id", least=0)
        if mask >= vocab:
            raise dflash.error("mask_token_id", f"must be under vocab_size {vocab}, got {mask}")
        types = _layer_types(f, layers)
        sliding = "sliding_attention" in types
        theta, scaling = _rope(f)
        return cls(
            vocab_size=vocab,
            hidden_size=f.integer("hidden_size"),
            intermediate_size=f.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            num_target_layers=target_layers,
            block_size=f.integer("block_size", least=2),
            taps=taps,
            mask_token_id=mask,
            layer_types=types,
            sliding_window=f.integer("sliding_window") if sliding else 0,
            rope_theta=theta,
            yarn=_yarn(scaling) if scaling is not None else None,
            max_positions=f.integer("max_position_embeddings"),
            rms_norm_eps=f.number("rms_norm_eps", default=1e-6),
        )

    def check_target(self, target: TargetConfig) -> None:
        """Raise ConfigError unless this drafter fits the ``target`` that it shares parts with."""
        pairs = (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        )
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise ConfigError(f"drafter: {name} is {ours}, the target has {theirs}")


def _yarn(f: Fields) -> YarnConfig:
    """Read a ``rope_scaling`` object of type yarn."""
    kind = _rope_type(f)
    if kind != "yarn":
        raise f.error("rope_type", f"{kind!r} is not supported: use yarn or none")
    factor = f.number("factor")
    if factor < 1:
        raise f.error("factor", f"must be at least 1, got {factor}")
    f.only("truncate", True, "only whole correction dimensions are supported")
    f.only("extrapolation_factor", 1, "only 1 is supported")
    for name in ("mscale", "mscale_all_dim"):
        f.only(name, None, "is not supported for yarn")
    beta_fast, beta_slow = f.number("beta_fast", 32.0), f.number("beta_slow", 1.0)
    if beta_fast <= beta_slow:
        raise f.error("beta_fast", f"must be over beta_slow ({beta_slow}), got {beta_fast}")
    return YarnConfig(
        factor=factor,
        original_max_positions=f.integer("original_max_position_embeddings"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=f.number("attn_factor", 1.0),
    )


def _layer_types(f: Fields, layers: int) -> tuple[LayerType, ...]:
    value = f.raw("layer_types", ["full_attention"] * layers)
    if not isinstance(value, list) or len(value) != layers:
        raise f.error(
            "layer_types", f"must list one type for each of {layers} layers, got {value!r}"
        )
    found: list[LayerType] = []
    for item in value:
        known = next((t for t in _LAYER_TYPES if t == item), None)
        if known is None:
            raise f.error("layer_types", f"must be among {', '.join(_LAYER_TYPES)}, got {item!r}")
        found.append(known)
    return tuple(found)
