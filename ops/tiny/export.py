"""Write a target and a drafter as the checkpoints that HF transformers and SGLang load.

    python export.py CHECKPOINT.pt TOKENIZER.json OUT_DIR

OUT_DIR/tiny-target and OUT_DIR/tiny-drafter hold config, bf16 weights and (target) tokenizer.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from model import Drafter, FeedForward, MixtureOfExperts, Target
from safetensors.torch import load_file, save_file
from shapes import GENERATION_CONFIG, TOKENIZER_CONFIG, DrafterShape, TargetShape
from torch import Tensor

WEIGHT_LIMIT = 12 * 2**20


def target_tensors(target: Target) -> dict[str, Tensor]:
    """Checkpoint name -> parameter (or a view of one), HF DeepseekV3ForCausalLM's names."""
    s = target.shape
    named: dict[str, Tensor] = {
        "model.embed_tokens.weight": target.embedding,
        "model.norm.weight": target.norm,
    }
    for i, layer in enumerate(target.layers):
        prefix, attention, ffn = f"model.layers.{i}.", layer.attention, layer.ffn
        named[prefix + "input_layernorm.weight"] = layer.norm1
        named[prefix + "post_attention_layernorm.weight"] = layer.norm2
        named[prefix + "self_attn.q_proj.weight"] = attention.q.weight
        named[prefix + "self_attn.kv_a_proj_with_mqa.weight"] = attention.kv_a.weight
        named[prefix + "self_attn.kv_a_layernorm.weight"] = attention.kv_norm
        named[prefix + "self_attn.kv_b_proj.weight"] = attention.kv_b.weight
        named[prefix + "self_attn.o_proj.weight"] = attention.out.weight
        if isinstance(ffn, MixtureOfExperts):
            named[prefix + "mlp.gate.weight"] = ffn.router
            named[prefix + "mlp.gate.e_score_correction_bias"] = ffn.bias
            gate, up = ffn.gate_up.weight.chunk(2)
            for e in range(s.experts):
                rows = slice(e * s.expert_ffn, (e + 1) * s.expert_ffn)
                named[prefix + f"mlp.experts.{e}.gate_proj.weight"] = gate[rows]
                named[prefix + f"mlp.experts.{e}.up_proj.weight"] = up[rows]
                named[prefix + f"mlp.experts.{e}.down_proj.weight"] = ffn.down.weight[:, rows]
            named |= feed_forward(prefix + "mlp.shared_experts.", ffn.shared)
        else:
            named |= feed_forward(prefix + "mlp.", ffn)
    return named


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Checkpoint name -> parameter, the names that SGLang's DFlashDraftModel loads."""
    named: dict[str, Tensor] = {
        "fc.weight": drafter.fc.weight,
        "hidden_norm.weight": drafter.context_norm,
        "norm.weight": drafter.norm,
    }
    for i, layer in enumerate(drafter.layers):
        prefix = f"layers.{i}."
        named[prefix + "input_layernorm.weight"] = layer.norm1
        named[prefix + "post_attention_layernorm.weight"] = layer.norm2
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")):
            named[prefix + f"self_attn.{theirs}_proj.weight"] = getattr(layer, ours).weight
        named[prefix + "self_attn.q_norm.weight"] = layer.q_norm
        named[prefix + "self_attn.k_norm.weight"] = layer.k_norm
        named |= feed_forward(prefix + "mlp.", layer.ffn)
    return named


def feed_forward(prefix: str, ffn: FeedForward) -> dict[str, Tensor]:
    gate, up = ffn.gate_up.weight.chunk(2)
    return {
        prefix + "gate_proj.weight": gate,
        prefix + "up_proj.weight": up,
        prefix + "down_proj.weight": ffn.down.weight,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_tensors(named: dict[str, Tensor], path: Path) -> None:
    wide = ("e_score_correction_bias",)  # HF and SGLang keep this one in float32
    rounded = {
        name: t.detach().cpu().to(torch.float32 if name.endswith(wide) else torch.bfloat16)
        for name, t in named.items()
    }
    save_file({n: t.contiguous() for n, t in rounded.items()}, path, metadata={"format": "pt"})


def export(target: Target, drafter: Drafter, tokenizer: Path, out: Path) -> int:
    """Write both checkpoints; bytes of weights written. Raises ValueError over the limit."""
    target_dir, drafter_dir = out / "tiny-target", out / "tiny-drafter"
    for folder in (target_dir, drafter_dir):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(target_dir / "config.json", target.shape.config())
    write_json(target_dir / "generation_config.json", GENERATION_CONFIG)
    write_json(target_dir / "tokenizer_config.json", TOKENIZER_CONFIG)
    shutil.copyfile(tokenizer, target_dir / "tokenizer.json")
    write_json(drafter_dir / "config.json", drafter.shape.config())
    save_tensors(target_tensors(target), target_dir / "model.safetensors")
    save_tensors(drafter_tensors(drafter), drafter_dir / "model.safetensors")
    size = sum(p.stat().st_size for p in out.glob("tiny-*/model.safetensors"))
    if size > WEIGHT_LIMIT:
        raise ValueError(f"weights take {size} bytes, the limit is {WEIGHT_LIMIT}")
    return size


@torch.no_grad()
def load_exported(folder: Path) -> tuple[Target, Drafter]:
    """Both models in float32 from an exported pair (the widened bf16 weights)."""
    target, drafter = Target(TargetShape()), Drafter(DrafterShape())
    for named, name in (
        (target_tensors(target), "tiny-target"),
        (drafter_tensors(drafter), "tiny-drafter"),
    ):
        stored = load_file(folder / name / "model.safetensors")
        if stored.keys() != named.keys():
            raise ValueError(f"{name}: tensors differ: {sorted(stored.keys() ^ named.keys())}")
        for key, view in named.items():
            view.copy_(stored[key])
    return target.eval(), drafter.eval()


def main() -> None:
    checkpoint, tokenizer, out = (Path(a) for a in sys.argv[1:4])
    target, drafter = Target(TargetShape()), Drafter(DrafterShape())
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    target.load_state_dict(state["target"])
    drafter.load_state_dict(state["drafter"])
    print("bytes of weights:", export(target, drafter, tokenizer, out))


if __name__ == "__main__":
    main()
