"""Train the tiny target, then its drafter on the frozen target. Resumable; budgets are wall time.

    python train.py --data DATA --work WORK --target-seconds 270 --drafter-seconds 210

WORK holds target.pt and drafter.pt (weights, optimizer, seconds done); run the same command again
to go on where it stopped, or with larger budgets to train longer. `--small` tries every phase on
a CPU in a minute.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Batches, anchors, load_tokens
from decode import distinct_ngrams, generate
from export import drafter_tensors, export, load_exported, target_tensors
from model import Drafter, MixtureOfExperts, Target, linear, rms_norm
from shapes import BLOCK, DrafterShape, TargetShape
from torch import Tensor, nn

LAGS = 8  # tokens before t that the taps at t should tell
TARGET_SHARES = (0.12, 0.03, 0.09, 0.06)  # REPEAT, RANDOM, PATTERN, CHAT
DRAFTER_SHARES = (0.34, 0.05, 0.18, 0.08)
POOL_SHARES = (0.08, 0.0, 0.12, 0.18)
START = time.monotonic()


def log(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


class Probes(nn.Module):
    """Auxiliary heads on the taps, dropped after training.

    Backward: which tokens stand 1..LAGS before t, everywhere. Forward: which stand 2..BLOCK
    after t, on structured rows. A plain DFlash drafter sees the context only through the taps of
    single positions, so what it shall copy must be written there.
    """

    def __init__(self, shape: TargetShape, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps, self.hidden, self.eps = taps, shape.hidden, shape.eps
        self.backward_heads = linear(len(taps) * shape.hidden, LAGS * shape.hidden)
        self.forward_heads = linear(len(taps) * shape.hidden, (BLOCK - 1) * shape.hidden)
        self.gain = nn.Parameter(torch.ones(shape.hidden))

    def loss(
        self, target: Target, tokens: Tensor, outputs: list[Tensor], structured: int, samples: int
    ) -> tuple[Tensor, Tensor]:
        batch, length = tokens.shape
        device = tokens.device
        t = torch.randint(LAGS, length - BLOCK, (samples,), device=device)
        results = []
        for heads, offsets, rows in (
            (self.backward_heads, -torch.arange(1, LAGS + 1, device=device), batch),
            (self.forward_heads, torch.arange(2, BLOCK + 1, device=device), structured),
        ):
            if rows == 0:
                results.append(torch.zeros((), device=device))
                continue
            row = torch.randint(rows, (samples,), device=device)
            features = torch.cat([outputs[i][row, t] for i in self.taps], -1)
            guess = heads(features).view(samples, -1, self.hidden)
            logits = target.head(rms_norm(guess, self.gain, self.eps))
            labels = tokens[row[:, None], t[:, None] + offsets]
            results.append(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))
        return results[0], results[1]


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.o = options
        self.device: str = options.device
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        self.batches = Batches(options.data, self.device)
        self.target = Target(TargetShape()).to(self.device)
        self.drafter = Drafter(DrafterShape()).to(self.device)
        if options.init is not None:
            for ours, theirs in zip(
                (self.target, self.drafter), load_exported(options.init), strict=True
            ):
                ours.load_state_dict(theirs.state_dict())
        log(
            "tokens",
            self.batches.train.numel(),
            self.batches.patterns.numel(),
            self.batches.chats.numel(),
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")

    # -- target -------------------------------------------------------------------------------

    def target_shape(self, done: float) -> tuple[int, int]:
        """(rows, length) of a batch at a share of the budget."""
        if self.o.small:
            return 3, 192
        if done < min(0.70, self.o.long_from):
            return 32, 2048
        return (16, 4096) if done < self.o.long_from else (4, 19456)

    def train_target(self) -> None:
        target, probes = self.target, Probes(TargetShape(), self.drafter.shape.taps)
        probes.to(self.device)
        matrices, others = [], []
        still = {
            id(target.embedding),
            id(target.layers[0].attention.q.weight),
            id(target.layers[0].attention.kv_a.weight),
        }
        for p in (*target.parameters(), *probes.parameters()):
            (others if p.dim() < 2 or id(p) in still else matrices).append(p)
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.device == "cuda")
        clock = Clock(self.o.target_seconds, self.work / "target.pt")
        clock.resume({"target": target, "probes": probes}, optimizer, self.device)
        parameters = matrices + others
        while clock.left():
            done = clock.done()
            rows, length = self.target_shape(done)
            if self.o.chat_every and clock.step % self.o.chat_every == 0:
                rows, length = (4, 128) if self.o.small else (160, 384)
                tokens, structured = self.batches.whole_chats(rows, length), 0
            else:
                tokens, structured = self.batches.draw(rows, length, TARGET_SHARES)
            set_rate(optimizer, self.o.target_rate * schedule(done))
            with self.autocast():
                hidden, outputs = target(tokens)
                logits = target.head(hidden[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                new_probes = self.o.init is not None and done < 0.05
                seen = [x.detach() for x in outputs] if new_probes else outputs
                past, future = probes.loss(target, tokens, seen, structured, self.o.samples)
                total = loss + 0.1 * past + 0.3 * future * (structured / rows)
            total.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            balance(target, 3e-3 if done < 0.5 else 1e-3 if done < 0.9 else 1e-4)
            if clock.tick(tokens.numel(), 200 if not self.o.small else 5):
                log(
                    f"target step {clock.step} {done:.0%} S {length} loss {loss.item():.3f} "
                    f"past {past.item():.3f} future {future.item():.3f} {clock.progress()}"
                )
            if clock.save_due():
                clock.save({"target": target, "probes": probes}, optimizer)
        clock.save({"target": target, "probes": probes}, optimizer)
        log(
            "target done",
            clock.step,
            "steps",
            clock.tokens,
            "tokens; expert load",
            [
                [round(x, 2) for x in m.load.tolist()]
                for m in mixtures(target)
                if m.load is not None
            ],
        )

    @torch.no_grad()
    def freeze(self) -> None:
        """Round the target to what its checkpoint holds: the drafter learns from that."""
        for name, view in target_tensors(self.target).items():
            if not name.endswith("e_score_correction_bias"):
                view.copy_(view.to(torch.bfloat16))
        self.target.requires_grad_(False).eval()

    @torch.no_grad()
    def held_out_losses(self) -> dict[str, float]:
        """Cross-entropy a token on held-out text, windows of 2048."""
        out = {}
        length = 128 if self.o.small else 2048
        for path in sorted(self.o.data.glob("held_*.npy.xz")):
            stream = load_tokens(path, self.device)
            rows = min(2 if self.o.small else 32, stream.numel() // (length + 1))
            tokens = stream[: rows * (length + 1)].view(rows, length + 1).long()
            with self.autocast():
                logits = self.target.head(self.target(tokens[:, :-1])[0])
            name = path.name.removeprefix("held_").removesuffix(".npy.xz")
            out[name] = F.cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten()
            ).item()
        return out

    # -- drafter ------------------------------------------------------------------------------

    def own_text(self) -> list[tuple[Tensor, int]]:
        """Greedy continuations of the frozen target: ([N, prompt + generated], prompt)."""
        rows = 4 if self.o.small else 1536
        pools = []
        for chats, prompt, count in ((False, 256, 384), (False, 256, 384), (True, 32, 224)):
            begun = time.monotonic()
            if self.o.small:
                prompt, count = 32, 24
            if chats:
                tokens = self.batches.whole_chats(rows, prompt)
            else:
                tokens, _ = self.batches.draw(rows, prompt, POOL_SHARES)
            with self.autocast():
                pool = generate(self.target, tokens, count)
            pools.append((pool, prompt))
            share = distinct_ngrams(pool[-64:, prompt:].tolist())
            log(
                f"own text {tuple(pool.shape)} in {time.monotonic() - begun:.1f} s, "
                f"distinct 8-grams {share:.2f}"
            )
        return pools

    def drafter_batch(self, pools: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, str]:
        u = torch.rand(()).item()
        if u < self.o.own_share:
            pool, first = pools[int(torch.randint(len(pools), ()))]
            rows, count = (4, 6) if self.o.small else (64, 128)
            pick = torch.randint(pool.shape[0], (rows,), device=self.device)
            tokens, kind = pool[pick], "own"
        else:
            rows, length, count = (2, 192, 8) if self.o.small else (16, 4096, 224)
            if u > 1.0 - self.o.long_share and not self.o.small:
                rows, length, count = 4, 19456, 256
            tokens, _ = self.batches.draw(rows, length, DRAFTER_SHARES)
            first, kind = 8, f"S {length}"
        return tokens, anchors(tokens.shape[1], count, first, BLOCK, self.device), kind

    def train_drafter(self) -> None:
        drafter = self.drafter
        matrices = [p for p in drafter.parameters() if p.dim() > 1]
        vectors = [p for p in drafter.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.05},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.device == "cuda")
        clock = Clock(self.o.drafter_seconds, self.work / "drafter.pt")
        clock.resume({"drafter": drafter}, optimizer, self.device)
        pools = self.own_text() if clock.left() else []
        weights = torch.exp(-torch.arange(BLOCK - 1, device=self.device) / 5.0)
        weights /= weights.sum()
        while clock.left():
            done = clock.done()
            tokens, where, kind = self.drafter_batch(pools)
            set_rate(optimizer, self.o.drafter_rate * schedule(done))
            labels = tokens[:, where[:, None] + torch.arange(1, BLOCK, device=self.device)]
            with self.autocast():
                with torch.no_grad():
                    _, outputs = self.target(tokens)
                logits = drafter(self.target, tokens, outputs, where)
                each = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
            loss = (each.view(labels.shape).float() * weights).sum(-1).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(matrices + vectors, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if clock.tick(labels.numel(), 100 if not self.o.small else 3):
                hits = (logits.argmax(-1) == labels).float().mean((0, 1)).tolist()
                log(
                    f"drafter step {clock.step} {done:.0%} {kind} loss {loss.item():.3f} "
                    f"hits {[round(h, 2) for h in hits]} {clock.progress()}"
                )
            if clock.save_due():
                clock.save({"drafter": drafter}, optimizer)
        clock.save({"drafter": drafter}, optimizer)
        log("drafter done", clock.step, "steps", clock.tokens, "draft tokens")


def mixtures(target: Target) -> list[MixtureOfExperts]:
    return [layer.ffn for layer in target.layers if isinstance(layer.ffn, MixtureOfExperts)]


@torch.no_grad()
def balance(target: Target, rate: float) -> None:
    """Nudge the routers' biases towards equal load (DeepSeek-V3, section 2.1.2)."""
    for mixture in mixtures(target):
        if mixture.load is not None:
            even = mixture.shape.experts_per_token / mixture.shape.experts
            mixture.bias += rate * torch.sign(even - mixture.load)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def schedule(done: float, warm: float = 0.02) -> float:
    if done < warm:
        return max(done / warm, 0.02)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warm) / (1 - warm))))


class Clock:
    """A phase's wall-time budget, counted over restarts, and its checkpoint file."""

    def __init__(self, budget: float, path: Path) -> None:
        self.budget, self.path = budget, path
        self.before, self.begun = 0.0, time.monotonic()
        self.step = self.tokens = 0
        self.last = (self.begun, 0)
        self.saved = self.begun

    def resume(
        self, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, device: str
    ) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location=device, weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(state[name])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        self.before, self.step, self.tokens = state["seconds"], state["step"], state["tokens"]
        log(f"resumed {self.path.name} at step {self.step}, {self.before:.0f} s done")
        self.begun = time.monotonic()
        self.last = (self.begun, self.tokens)

    def save(self, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        state: dict[str, object] = {n: m.state_dict() for n, m in modules.items()}
        state |= {
            "optimizer": optimizer.state_dict(),
            "seconds": self.spent(),
            "step": self.step,
            "tokens": self.tokens,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.path)

    def save_due(self, every: float = 90.0) -> bool:
        if time.monotonic() - self.saved < every:
            return False
        self.saved = time.monotonic()
        return True

    def spent(self) -> float:
        return self.before + time.monotonic() - self.begun

    def done(self) -> float:
        return self.spent() / self.budget if self.budget > 0 else 1.0

    def left(self) -> bool:
        return self.done() < 1.0

    def tick(self, tokens: int, every: int) -> bool:
        self.step += 1
        self.tokens += tokens
        return self.step % every == 0

    def progress(self) -> str:
        now = time.monotonic()
        rate = (self.tokens - self.last[1]) / max(now - self.last[0], 1e-9)
        self.last = (now, self.tokens)
        return f"{rate / 1e6:.2f} M tokens/s, {max(self.budget - self.spent(), 0):.0f} s to go"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="export here (default: WORK)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-seconds", type=float, default=270.0)
    parser.add_argument("--drafter-seconds", type=float, default=210.0)
    parser.add_argument("--target-rate", type=float, default=3e-3)
    parser.add_argument("--drafter-rate", type=float, default=2e-3)
    parser.add_argument("--own-share", type=float, default=0.35, help="drafter: own greedy text")
    parser.add_argument("--long-share", type=float, default=0.12, help="drafter: 19k rows")
    parser.add_argument("--init", type=Path, help="start from this exported pair")
    parser.add_argument("--chat-every", type=int, default=0, help="target: a batch of chats each")
    parser.add_argument("--long-from", type=float, default=0.85, help="target: then rows of 19k")
    parser.add_argument("--samples", type=int, default=1024, help="positions probed a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles anew for every mask shape
    trainer = Trainer(options)
    out = options.out or options.work
    trainer.train_target()
    trainer.freeze()
    log("held-out losses", {k: round(v, 3) for k, v in trainer.held_out_losses().items()})
    tokenizer = options.data / "tokenizer.json"
    export(trainer.target, trainer.drafter, tokenizer, out)
    trainer.train_drafter()
    size = export(trainer.target, trainer.drafter, tokenizer, out)
    log("exported", size, "bytes,", len(drafter_tensors(trainer.drafter)), "drafter tensors")
    if trainer.device == "cuda":
        log(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
