"""Greedy decoding with a cache, and the commit_len that chain and tree would have reached."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from model import Drafter, Target
from shapes import BLOCK
from torch import Tensor

DEPTH = BLOCK - 1


@torch.no_grad()
def generate(target: Target, prompts: Tensor, count: int, chunk: int = 131072) -> Tensor:
    """[P, L] -> [P, L + count], greedy. The cache has the dtype that the model computes in."""
    rows, length = prompts.shape
    device = prompts.device.type
    narrow = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if narrow else torch.float32
    cache = target.new_cache(rows, length + count, dtype)
    step = max(1, chunk // length)
    last = []
    for r in range(0, rows, step):
        part = [[held[r : r + step] for held in layer] for layer in cache]
        last.append(target(prompts[r : r + step], part)[0][:, -1:])
    hidden, out = torch.cat(last), [prompts]
    for i in range(count):
        token = target.head(hidden).argmax(-1)
        out.append(token)
        if i + 1 < count:
            hidden = target(token, cache, length + i)[0]
    return torch.cat(out, 1)


def tree_depth(
    log_probs: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    truth: Sequence[int],
    budget: int,
) -> int:
    """Accepted drafts of a tree seeded with the chain, then grown best-first to `budget` nodes.

    log_probs, tokens [DEPTH][K] sorted by falling probability; truth [DEPTH] the greedy tokens.
    """
    heap: list[tuple[float, int, int, bool]] = []  # (-score, depth, rank, is the parent right)
    score, right, accepted = 0.0, True, 0
    for depth in range(DEPTH):
        heap.append((score - log_probs[depth][1], depth, 1, right))
        score -= log_probs[depth][0]
        right = right and tokens[depth][0] == truth[depth]
        accepted += right
    heapq.heapify(heap)
    nodes = DEPTH
    while heap and nodes < budget:
        score, depth, rank, parent_right = heapq.heappop(heap)
        nodes += 1
        hit = parent_right and tokens[depth][rank] == truth[depth]
        if hit:
            accepted = max(accepted, depth + 1)
        if rank + 1 < len(tokens[depth]):
            gap = log_probs[depth][rank] - log_probs[depth][rank + 1]
            heapq.heappush(heap, (score + gap, depth, rank + 1, parent_right))
        if depth + 1 < DEPTH:
            heapq.heappush(heap, (score - log_probs[depth + 1][0], depth + 1, 0, hit))
    return accepted


@dataclass(frozen=True)
class Commits:
    chain: list[float]  # mean commit_len of each prompt
    tree: list[float]
    accuracy: list[float]  # of the draft's first choice, by depth


@torch.no_grad()
def commit_lens(
    target: Target, drafter: Drafter, tokens: Tensor, start: int, budget: int = 16
) -> Commits:
    """tokens [P, N]: prompts of `start` tokens and their greedy continuation.

    The first anchor is the first generated token, as in serving. A step that reaches past the
    end of the row is not counted.
    """
    rows, length = tokens.shape
    where = torch.arange(start, length - DEPTH, device=tokens.device)
    labels = tokens[:, where[:, None] + torch.arange(1, BLOCK, device=tokens.device)]
    chains, trees, hits = [], [], torch.zeros(DEPTH)
    for r in range(rows):
        _, outputs = target(tokens[r : r + 1])
        logits = drafter(target, tokens[r : r + 1], outputs, where)[0]
        top = torch.log_softmax(logits.float(), -1).topk(16, -1)
        log_probs, choices = top.values.tolist(), top.indices.tolist()
        truth = labels[r].tolist()
        hits += (top.indices[..., 0] == labels[r]).float().mean(0).cpu() / rows
        for budget_here, into in ((DEPTH, chains), (budget, trees)):
            at, steps = 0, 0
            while at < len(truth):
                at += 1 + tree_depth(log_probs[at], choices[at], truth[at], budget_here)
                steps += 1
            into.append(at / steps)
    return Commits(chains, trees, [round(x, 3) for x in hits.tolist()])


def distinct_ngrams(rows: Sequence[Sequence[int]], n: int = 8) -> float:
    """Distinct n-grams over all n-grams, mean over rows: 1 is no loop at all."""
    shares = [
        len({tuple(r[i : i + n]) for i in range(len(r) - n + 1)}) / max(len(r) - n + 1, 1)
        for r in rows
    ]
    return math.fsum(shares) / len(shares)
