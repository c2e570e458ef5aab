"""What the embedded engine answers to the prompts of tests/gpu/engine: the data they compare with.

``python -m ops.gpu.reference`` writes tests/gpu/engine/data/embedded.json.xz (CPU only, minutes).
"""

import json
import lzma
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from longleaf.embedded.engine import Engine
from longleaf.embedded.options import SpeculativeOptions
from longleaf.probes.progress import Progress
from ops.bench.commit import answer, lossless_prompts, tiny_engine
from ops.bench.prompts import Prompt, PromptSource

DATA = Path(__file__).resolve().parents[2] / "tests/gpu/engine/data/embedded.json.xz"
NODES = 16
"""Verified nodes a step, the root included: the width that these tests fix in SGLang."""
BLOCK = 8


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one kind. tokens: answered tokens each."""

    name: str
    prompts: Sequence[Prompt]
    tokens: int


def prompt_sets(source: PromptSource) -> list[PromptSet]:
    """The prompts of the acceptance tests, and the fifty of the lossless test."""
    return [
        PromptSet("predictable_1k", source.predictable(1024, 2), 128),
        PromptSet("predictable_8k", source.predictable(8192, 1), 128),
        PromptSet("prose_1k", source.cut("prose", 1024, 3), 64),
        PromptSet("code_1k", source.cut("code", 1024, 2), 64),
    ]


def lossless_set(source: PromptSource) -> PromptSet:
    """Fifty prompts of every kind and of several lengths."""
    return PromptSet("lossless", lossless_prompts(source), 256)


def _answers(engine: Engine, prompts: PromptSet, progress: Progress) -> dict[str, Any]:
    answers = []
    for prompt in prompts.prompts:
        answers.append(answer(engine, prompt, prompts.tokens))
        progress.step(f"{prompt.name}: commit_len {answers[-1].commit_len:.2f}")
    return {
        "steps": [item.steps for item in answers],
        "committed": [item.committed for item in answers],
        "tokens": [list(item.tokens) for item in answers],
    }


@click.command()
def main() -> None:
    """Run the embedded engine over the prompts, with trees and with chains."""
    progress = Progress(sys.stderr)
    document: dict[str, Any] = {"command": "python -m ops.gpu.reference", "nodes": NODES}
    with ExitStack() as stack:
        tree, tokenizer = tiny_engine(stack, SpeculativeOptions(budget=NODES - 1))
        chain, _ = tiny_engine(stack, SpeculativeOptions(budget=BLOCK - 1, topk=1))
        source = PromptSource(tokenizer)
        sets = prompt_sets(source)
        progress.expect(2 * sum(len(item.prompts) for item in sets) + 50)
        document["tree"] = {item.name: _answers(tree, item, progress) for item in sets}
        document["chain"] = {item.name: _answers(chain, item, progress) for item in sets}
        lossless = lossless_set(source)
        document["tree"][lossless.name] = _answers(tree, lossless, progress)
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_bytes(lzma.compress(json.dumps(document, separators=(",", ":")).encode()))
    click.echo(f"written to {DATA}")


if __name__ == "__main__":
    main()
