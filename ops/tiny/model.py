"""The target (MLA + MoE) and the DFlash drafter as plain torch modules, for training.

Residual streams and matrix products run in the dtype of the surrounding autocast; parameters
stay float32. Module names differ from the checkpoint's; export.py maps them.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from shapes import BLOCK, MASK, VOCAB, DrafterShape, TargetShape
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps).to(x.dtype)  # autocast widens it


def linear(n_in: int, n_out: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(n_in))
    return layer


def rope_frequencies(dim: int, theta: float) -> Tensor:
    """float64[dim/2] angular frequencies."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(dim: int, theta: float, yarn: dict[str, float]) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): (float64[dim/2] frequencies, factor on cos and sin)."""
    base = rope_frequencies(dim, theta)
    original = yarn["original_max_position_embeddings"]

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn["beta_fast"])), 0)
    high = min(math.ceil(correction(yarn["beta_slow"])), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    interpolate = ramp.clamp(0, 1)
    frequencies = base / yarn["factor"] * interpolate + base * (1 - interpolate)
    return frequencies, 0.1 * math.log(yarn["factor"]) + 1.0


@dataclass(frozen=True)
class Rotation:
    """cos and sin of a set of positions, float32[T, dim/2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> "Rotation":
        angles = positions.double()[:, None] * frequencies
        return cls((angles.cos() * scale).float(), (angles.sin() * scale).float())

    def interleaved(self, x: Tensor) -> Tensor:
        """Rotate pairs (2i, 2i+1) of x [.., T, heads, dim]."""
        cos, sin = self.cos.to(x.dtype)[:, None], self.sin.to(x.dtype)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    def halves(self, x: Tensor) -> Tensor:
        """Rotate pairs (i, i + dim/2) of x [.., T, heads, dim]."""
        cos, sin = self.cos.to(x.dtype)[:, None], self.sin.to(x.dtype)[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = linear(hidden, 2 * ffn)
        self.down = linear(ffn, hidden, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class MixtureOfExperts(nn.Module):
    """All experts computed densely, then weighted by the sparse router: exact, and simple.

    `bias` is the load-balancing correction of DeepSeek-V3 (no auxiliary loss): it takes part in
    the choice of experts, not in their weights.
    """

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.shape = s
        self.router = nn.Parameter(torch.randn(s.experts, s.hidden) * 0.06)
        self.register_buffer("bias", torch.zeros(s.experts))
        self.gate_up = linear(s.hidden, 2 * s.experts * s.expert_ffn)
        self.down = linear(s.experts * s.expert_ffn, s.hidden)
        self.shared = FeedForward(s.hidden, s.expert_ffn)
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.router))
        chosen = (scores.detach() + self.bias).topk(s.experts_per_token, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scale
        dense = torch.zeros_like(scores).scatter(-1, chosen, weights)
        if self.training:
            self.load = (dense.detach() > 0).float().flatten(0, -2).mean(0)
        gate, up = self.gate_up(x).unflatten(-1, (2, s.experts, s.expert_ffn)).unbind(-3)
        mixed = (F.silu(gate) * up * dense.to(gate.dtype)[..., None]).flatten(-2)
        out: Tensor = self.down(mixed) + self.shared(x)
        return out


class LatentAttention(nn.Module):
    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.shape = s
        self.q = linear(s.hidden, s.heads * (s.nope + s.rope))
        self.kv_a = linear(s.hidden, s.kv_lora + s.rope)
        self.kv_norm = nn.Parameter(torch.ones(s.kv_lora))
        self.kv_b = linear(s.kv_lora, s.heads * (s.nope + s.value))
        self.out = linear(s.heads * s.value, s.hidden, 0.3)

    def forward(
        self, x: Tensor, rotation: Rotation, cache: list[Tensor] | None, start: int
    ) -> Tensor:
        s, (batch, length, _) = self.shape, x.shape
        q = self.q(x).view(batch, length, s.heads, s.nope + s.rope)
        latent, k_rope = self.kv_a(x).split([s.kv_lora, s.rope], -1)
        kv = self.kv_b(rms_norm(latent, self.kv_norm, s.eps))
        k_nope, v = kv.view(batch, length, s.heads, -1).split([s.nope, s.value], -1)
        q = torch.cat((q[..., : s.nope], rotation.interleaved(q[..., s.nope :])), -1)
        k_rope = rotation.interleaved(k_rope[:, :, None]).expand(-1, -1, s.heads, -1)
        k = torch.cat((k_nope, k_rope), -1)
        v = F.pad(v, (0, s.nope + s.rope - s.value))  # flash attention wants equal widths
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            for held, new in zip(cache, (k, v), strict=True):
                held[:, :, start : start + length] = new
            if length == 1:
                k, v = (held[:, :, : start + 1] for held in cache)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        out: Tensor = self.out(y[..., : s.value].transpose(1, 2).flatten(-2))
        return out


class TargetLayer(nn.Module):
    def __init__(self, s: TargetShape, index: int) -> None:
        super().__init__()
        self.eps = s.eps
        self.norm1 = nn.Parameter(torch.ones(s.hidden))
        self.norm2 = nn.Parameter(torch.ones(s.hidden))
        self.attention = LatentAttention(s)
        self.ffn = FeedForward(s.hidden, s.dense_ffn) if index == 0 else MixtureOfExperts(s)

    def forward(
        self, x: Tensor, rotation: Rotation, cache: list[Tensor] | None, start: int
    ) -> Tensor:
        x = x + self.attention(rms_norm(x, self.norm1, self.eps), rotation, cache, start)
        out: Tensor = x + self.ffn(rms_norm(x, self.norm2, self.eps))
        return out


class Target(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(VOCAB, shape.hidden) * 0.04)
        self.layers = nn.ModuleList(TargetLayer(shape, i) for i in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        frequencies = rope_frequencies(shape.rope, shape.rope_theta)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.start_as_lag_heads()

    @torch.no_grad()
    def start_as_lag_heads(self, sharpness: float = 6.5, pairs: int = 14) -> None:
        """Start head h of layer 0 as "the token h + 1 places back".

        A drafter that reads features of single positions can copy a repeat only where a feature
        tells which tokens precede it. One embedding coordinate is constant over the vocabulary;
        query and key rotary parts read it, and their phases are set to agree at that lag.
        """
        s, layer = self.shape, self.layers[0]
        self.embedding[:, 0] = 0.12
        constant = 0.12 / math.sqrt((0.12**2 + (s.hidden - 1) * 0.04**2) / s.hidden)
        amplitude = math.sqrt(sharpness * math.sqrt(s.nope + s.rope)) / constant
        key = layer.attention.kv_a.weight[s.kv_lora :]
        key.mul_(0.1)
        key[0 : 2 * pairs : 2, 0] = amplitude
        query = layer.attention.q.weight.view(s.heads, s.nope + s.rope, s.hidden)
        query[:, : s.nope].mul_(0.1)
        query[:, s.nope :].mul_(0.1)
        for head in range(s.heads):
            phase = (head + 1) * self.frequencies[:pairs]
            query[head, s.nope : s.nope + 2 * pairs : 2, 0] = amplitude * phase.cos().float()
            query[head, s.nope + 1 : s.nope + 2 * pairs : 2, 0] = -amplitude * phase.sin().float()

    def embed(self, tokens: Tensor) -> Tensor:
        out = F.embedding(tokens, self.embedding)
        device = out.device.type
        return (
            out.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else out
        )

    def forward(
        self, tokens: Tensor, cache: list[list[Tensor]] | None = None, start: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> (hidden [B, T, hidden] after the final norm, outputs of each layer)."""
        x = self.embed(tokens)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        rotation = Rotation.at(positions, self.frequencies)
        outputs = []
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, None if cache is None else cache[i], start)
            outputs.append(x)
        return rms_norm(x, self.norm, self.shape.eps), outputs

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.to(hidden.dtype))

    def new_cache(self, batch: int, length: int, dtype: torch.dtype) -> list[list[Tensor]]:
        s, device = self.shape, self.embedding.device
        size = (batch, s.heads, length, s.nope + s.rope)
        return [
            [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
            for _ in range(s.layers)
        ]


class DraftLayer(nn.Module):
    def __init__(self, s: DrafterShape) -> None:
        super().__init__()
        self.shape = s
        self.norm1 = nn.Parameter(torch.ones(s.hidden))
        self.norm2 = nn.Parameter(torch.ones(s.hidden))
        self.q = linear(s.hidden, s.heads * s.head_dim)
        self.k = linear(s.hidden, s.kv_heads * s.head_dim)
        self.v = linear(s.hidden, s.kv_heads * s.head_dim)
        self.out = linear(s.heads * s.head_dim, s.hidden, 0.5)
        self.q_norm = nn.Parameter(torch.ones(s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(s.head_dim))
        self.ffn = FeedForward(s.hidden, s.ffn)

    def forward(
        self, x: Tensor, context: Tensor, q_rotation: Rotation, k_rotation: Rotation, mask: Tensor
    ) -> Tensor:
        """x [B, Q, hidden], context [B, S, hidden], mask [1, 1, Q, S + Q] additive."""
        s, (batch, rows, _) = self.shape, x.shape
        normed = rms_norm(x, self.norm1, s.eps)
        both = torch.cat((context, normed), 1)
        q = self.q(normed).view(batch, rows, s.heads, s.head_dim)
        k = self.k(both).view(batch, -1, s.kv_heads, s.head_dim)
        v = self.v(both).view(batch, -1, s.kv_heads, s.head_dim)
        q = q_rotation.halves(rms_norm(q, self.q_norm, s.eps)).transpose(1, 2)
        k = k_rotation.halves(rms_norm(k, self.k_norm, s.eps))
        group = s.heads // s.kv_heads
        k, v = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
        mask = mask.to(q.dtype).expand(batch, s.heads, -1, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.ffn(rms_norm(x, self.norm2, s.eps))
        return out


class Drafter(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(len(shape.taps) * shape.hidden, shape.hidden)
        self.context_norm = nn.Parameter(torch.ones(shape.hidden))
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in shape.layer_types)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        frequencies, self.rope_scale = yarn_frequencies(
            shape.head_dim, shape.rope_theta, shape.yarn
        )
        self.register_buffer("frequencies", frequencies, persistent=False)

    def visible(self, kind: str, anchors: Tensor, length: int) -> Tensor:
        """bool[A * BLOCK, length + A * BLOCK]: which context and block rows a block row sees."""
        device = anchors.device
        offset = torch.arange(BLOCK, device=device).repeat(len(anchors))
        start = anchors.repeat_interleave(BLOCK)
        owner = torch.arange(len(anchors), device=device).repeat_interleave(BLOCK)
        query = start + offset
        context = torch.arange(length, device=device)
        sees_context = context[None] < start[:, None]
        sees_block = owner[None] == owner[:, None]
        if kind == "sliding_attention":  # causal, also inside the block
            sees_context &= query[:, None] - context[None] < self.shape.window
            sees_block &= offset[None] <= offset[:, None]
        return torch.cat((sees_context, sees_block), 1)

    def forward(
        self, target: Target, tokens: Tensor, outputs: list[Tensor], anchors: Tensor
    ) -> Tensor:
        """Draft after each anchor position (shared by the rows of the batch).

        tokens [B, S], outputs: the target's layer outputs, anchors [A] -> logits [B, A, 7, V].
        """
        (batch, length), count, device = tokens.shape, len(anchors), tokens.device
        features = torch.cat([outputs[i] for i in self.shape.taps], -1)
        context = rms_norm(self.fc(features), self.context_norm, self.shape.eps)
        block = torch.full((batch, count, BLOCK), MASK, device=device)
        block[:, :, 0] = tokens[:, anchors]
        x = target.embed(block.flatten(1))
        rows = (anchors[:, None] + torch.arange(BLOCK, device=device)).flatten()
        positions = torch.arange(length, device=device)
        q_rotation = Rotation.at(rows, self.frequencies, self.rope_scale)
        k_rotation = Rotation.at(torch.cat((positions, rows)), self.frequencies, self.rope_scale)
        for layer, kind in zip(self.layers, self.shape.layer_types, strict=True):
            sees = self.visible(kind, anchors, length)
            mask = torch.zeros(sees.shape, dtype=x.dtype, device=device)
            mask = mask.masked_fill_(~sees, float("-inf"))[None, None]
            x = layer(x, context, q_rotation, k_rotation, mask)
        x = rms_norm(x, self.norm, self.shape.eps).view(batch, count, BLOCK, -1)
        return target.head(x[:, :, 1:])
