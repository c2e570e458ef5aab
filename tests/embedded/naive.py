"""Both models as plainly as the papers write them: float64, one token list, no cache, no fusing."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Tensors = dict[str, npt.NDArray[np.float32]]


def norm(x: F64, weight: Any, eps: float) -> F64:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight, np.float64)


def silu(x: F64) -> F64:
    return np.asarray(x / (1 + np.exp(-x)), np.float64)


def ffn(x: F64, w: Tensors, prefix: str) -> F64:
    gate = silu(x @ w[prefix + "gate_proj.weight"].T)
    out = (gate * (x @ w[prefix + "up_proj.weight"].T)) @ w[prefix + "down_proj.weight"].T
    return np.asarray(out, np.float64)


def softmax(scores: F64, visible: Any) -> F64:
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True), np.float64)


def rope(vector: F64, angles: list[float], scale: float, interleaved: bool) -> F64:
    """Rotate one vector, pair by pair."""
    out = np.empty_like(vector)
    half = len(vector) // 2
    for i, angle in enumerate(angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = scale * math.cos(angle), scale * math.sin(angle)
        out[a] = vector[a] * cos - vector[b] * sin
        out[b] = vector[b] * cos + vector[a] * sin
    return out


def yarn(c: dict[str, Any]) -> tuple[list[float], float]:
    """Frequencies and the factor on cos and sin, from the wavelengths as the YaRN paper does."""
    s, dim, theta = c["rope_scaling"], c["head_dim"], c["rope_theta"]
    original, factor = s["original_max_position_embeddings"], s["factor"]

    def index(turns: float) -> float:
        """The (real) pair index whose wave turns this often within the original context."""
        return float(math.log(original / (2 * math.pi * turns), theta) * dim / 2)

    low, high = max(0, math.floor(index(s["beta_fast"]))), math.ceil(index(s["beta_slow"]))
    frequencies = []
    for i in range(dim // 2):
        f = theta ** (-2 * i / dim)
        gamma = 1 - min(max((i - low) / (high - low), 0), 1)  # 1: keep, 0: interpolate
        frequencies.append((1 - gamma) * f / factor + gamma * f)
    return frequencies, 0.1 * math.log(factor) + 1


def target_forward(
    c: dict[str, Any], w: Tensors, tokens: Any, positions: Any, visible: Any
) -> tuple[F64, list[F64]]:
    """(logits [T, V], outputs of each layer). Row i sees row j iff visible[i, j]."""
    heads, rank, eps = c["num_attention_heads"], c["kv_lora_rank"], c["rms_norm_eps"]
    nope, rope_dim, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    frequencies = [c["rope_theta"] ** (-2 * i / rope_dim) for i in range(rope_dim // 2)]
    turned = c["rope_interleave"]

    def rotate(vector: F64, position: int) -> F64:
        return rope(vector, [position * f for f in frequencies], 1.0, turned)

    x = w["model.embed_tokens.weight"][tokens].astype(np.float64)
    count = len(tokens)
    outputs = []
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(count, heads, nope + rope_dim)
        a = h @ w[p + "self_attn.kv_a_proj_with_mqa.weight"].T
        latent = norm(a[:, :rank], w[p + "self_attn.kv_a_layernorm.weight"], 1e-6)
        kv = (latent @ w[p + "self_attn.kv_b_proj.weight"].T).reshape(count, heads, nope + v)
        k_rope = np.array([rotate(a[t, rank:], positions[t]) for t in range(count)])
        mixed = np.empty((count, heads, v))
        for head in range(heads):
            q_rope = [rotate(q[t, head, nope:], positions[t]) for t in range(count)]
            scores = q[:, head, :nope] @ kv[:, head, :nope].T + np.array(q_rope) @ k_rope.T
            weights = softmax(scores / math.sqrt(nope + rope_dim), visible)
            mixed[:, head] = weights @ kv[:, head, nope:]
        x = x + mixed.reshape(count, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        if i < c["first_k_dense_replace"]:
            x = x + ffn(h, w, p + "mlp.")
        else:
            x = x + np.array([experts(row, c, w, p + "mlp.") for row in h])
        outputs.append(x)
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"], eps) @ head_weight.T, outputs


def experts(row: F64, c: dict[str, Any], w: Tensors, prefix: str) -> F64:
    scores = 1 / (1 + np.exp(-(w[prefix + "gate.weight"] @ row)))
    biased = scores + w[prefix + "gate.e_score_correction_bias"]
    best = sorted(range(len(scores)), key=lambda e: -biased[e])[: c["num_experts_per_tok"]]
    total = sum(scores[e] for e in best) if c["norm_topk_prob"] else 1.0
    out = ffn(row, w, prefix + "shared_experts.")
    for e in best:
        share = scores[e] / total * c["routed_scaling_factor"]
        out = out + share * ffn(row, w, f"{prefix}experts.{e}.")
    return out


def draft(
    tc: dict[str, Any], tw: Tensors, c: dict[str, Any], w: Tensors, features: F64, anchor: int
) -> F64:
    """Logits [block - 1, V] after ``anchor``, which follows a context of len(features) tokens."""
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    eps, block, context = c["rms_norm_eps"], c["block_size"], len(features)
    frequencies, scale = yarn(c)

    def rotate(vector: F64, position: int) -> F64:
        return rope(vector, [position * f for f in frequencies], scale, interleaved=False)

    embed = tw["model.embed_tokens.weight"].astype(np.float64)
    x = embed[[anchor] + [c["dflash_config"]["mask_token_id"]] * (block - 1)]
    injected = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    key_at = np.arange(context + block)
    query_at = context + np.arange(block)
    for i, kind in enumerate(c["layer_types"]):
        p = f"layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        rows = np.concatenate((injected, h))
        q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(block, heads, dim)
        k = (rows @ w[p + "self_attn.k_proj.weight"].T).reshape(-1, kv_heads, dim)
        v = (rows @ w[p + "self_attn.v_proj.weight"].T).reshape(-1, kv_heads, dim)
        q, k = (
            norm(q, w[p + "self_attn.q_norm.weight"], eps),
            norm(k, w[p + "self_attn.k_norm.weight"], eps),
        )
        visible = np.ones((block, context + block), bool)
        if kind == "sliding_attention":
            back = query_at[:, None] - key_at
            visible = (back >= 0) & (back < c["sliding_window"])
        mixed = np.empty((block, heads, dim))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            turned_q = np.array([rotate(q[t, head], query_at[t]) for t in range(block)])
            turned_k = np.array([rotate(k[t, kv], key_at[t]) for t in range(len(rows))])
            mixed[:, head] = softmax(turned_q @ turned_k.T / math.sqrt(dim), visible) @ v[:, kv]
        x = x + mixed.reshape(block, -1) @ w[p + "self_attn.o_proj.weight"].T
        x = x + ffn(norm(x, w[p + "post_attention_layernorm.weight"], eps), w, p + "mlp.")
    head_weight = tw.get("lm_head.weight", tw["model.embed_tokens.weight"])
    return (norm(x, w["norm.weight"], eps) @ head_weight.T)[1:]
