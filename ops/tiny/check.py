"""Equality checks of the training code against itself and HF transformers (float32, CPU).

    python check.py MODELS_FOLDER

Cached decoding gives the full forward's argmax; a draft depends on nothing after its anchor; the
windowed layers see exactly their window; the tree never does worse than the chain and equals
brute force; HF's DeepseekV3ForCausalLM computes the same logits from the exported files.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from decode import DEPTH, generate, tree_depth
from export import load_exported
from model import Drafter, Target
from shapes import VOCAB
from transformers import DeepseekV3ForCausalLM


@torch.no_grad()
def check_cache(target: Target) -> None:
    prompts = torch.randint(8, VOCAB, (3, 40))
    made = generate(target, prompts, 24)
    best = target.head(target(made)[0]).argmax(-1)
    assert torch.equal(best[:, 39:-1], made[:, 40:]), "cached decoding differs"


@torch.no_grad()
def check_leaks(target: Target, drafter: Drafter) -> None:
    tokens = torch.randint(8, VOCAB, (2, 400))
    where = torch.tensor([20, 350])

    def draft(changed: torch.Tensor) -> torch.Tensor:
        return drafter(target, changed, target(changed)[1], where)

    base, later, anchor = draft(tokens), tokens.clone(), tokens.clone()
    later[:, 351:] = 5
    assert torch.equal(base, draft(later)), "a draft depends on tokens after its anchor"
    anchor[:, 350] = 9
    moved = (draft(anchor) - base).abs().amax((0, 2, 3))
    assert moved[0] == 0, "a draft depends on another draft's anchor token"
    assert moved[1] > 0, "the anchor's token must matter"


def check_window(drafter: Drafter) -> None:
    sees = drafter.visible("sliding_attention", torch.tensor([300, 400]), 500)
    for a, start in enumerate((300, 400)):
        for j in range(8):
            row, query = sees[8 * a + j], start + j
            context = set(row[:500].nonzero().flatten().tolist())
            assert context == set(range(query - drafter.shape.window + 1, start))
            block = row[500:].nonzero().flatten().tolist()
            assert block == [8 * a + i for i in range(j + 1)]
    full = drafter.visible("full_attention", torch.tensor([300]), 500)
    assert full[0, :500].sum() == 300
    assert bool(full[:, 500:].all())


def check_tree() -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        probs = rng.dirichlet(np.ones(4) * 0.5, DEPTH) + 1e-9
        order = np.argsort(-probs, 1)
        log_probs = np.log(np.take_along_axis(probs, order, 1)).tolist()
        tokens = order.tolist()
        truth = [int(rng.choice(4, p=p / p.sum())) for p in probs]
        chain = tree_depth(log_probs, tokens, truth, DEPTH)
        expected = next((d for d in range(DEPTH) if tokens[d][0] != truth[d]), DEPTH)
        assert chain == expected
        assert tree_depth(log_probs, tokens, truth, 16) >= chain
        if trial < 5:  # brute force: the chain's prefixes, then the best others
            paths = [q for n in range(1, DEPTH + 1) for q in itertools.product(range(4), repeat=n)]
            paths.sort(key=lambda q: -sum(log_probs[d][r] for d, r in enumerate(q)))
            nodes = {(0,) * n for n in range(1, DEPTH + 1)}
            for q in paths:
                if len(nodes) == 16:
                    break
                nodes.add(q)
            best = max(
                (
                    len(q)
                    for q in nodes
                    if [tokens[d][r] for d, r in enumerate(q)] == truth[: len(q)]
                ),
                default=0,
            )
            assert tree_depth(log_probs, tokens, truth, 16) == best


@torch.no_grad()
def check_transformers(target: Target, folder: Path) -> float:
    reference = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(8, VOCAB, (2, 300))
    theirs, ours = reference(tokens).logits, target.head(target(tokens)[0])
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < 1e-4, f"relative error against transformers {error}"
    return error


def main() -> None:
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    target, drafter = load_exported(folder)
    check_cache(target)
    check_leaks(target, drafter)
    check_window(drafter)
    check_tree()
    error = check_transformers(target, folder / "tiny-target")
    print(f"all equal; relative error against transformers {error:.1e}")


if __name__ == "__main__":
    main()
