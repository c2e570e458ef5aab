"""What each tensor-parallel rank decided, step by step, and whether all decided the same.

`register` is a plugin for SGLang in place of ours: it registers ours, and lets every rank write
one line a step to a file of its own: digests of the trees, the accepted paths and the committed
tokens. Waits for the GPU in every step: for checks, not for timing.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = "LONGLEAF_RANKS"
"""Environment variable: the folder that the ranks write to."""
PLUGIN = "longleaf_ranks"
DECISIONS = ("trees", "paths", "tokens")


def register() -> None:
    """The entry point."""
    from longleaf.engine.plugin import register as register_ours

    register_ours()
    watch()


def watch() -> None:
    """Write what every step decides."""
    worker: Any = import_module("longleaf.engine.worker")
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    commit = worker.committed

    def watched(trees: Any, accepted: Any, *others: Any) -> Any:
        import torch

        done = commit(trees, accepted, *others)
        line = " ".join(
            digest(parts)
            for parts in (
                (trees.tokens, trees.parents, trees.visible, trees.positions),
                (accepted.path, accepted.path_len),
                (done.tokens, done.lengths, done.bonus),
            )
        )
        with rank_file(folder, torch.distributed.get_rank()).open("a") as out:
            out.write(line + "\n")
        return done

    worker.committed = watched


def digest(parts: Sequence[Any]) -> str:
    """A digest of tensors' values."""
    data = b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()[:32]


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank{rank}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Steps that every rank wrote, and those in which they differ: at all, and in what."""

    steps: int
    mismatched: int
    by_decision: dict[str, int]


def compare(folder: Path, ranks: int, skipped: int = 0) -> Comparison:
    """Compare the ranks' files, the first ``skipped`` steps left out.

    A step that one rank has not written yet is not compared, unless ranks are apart by more than
    the step that is under way: then each such step is a mismatch.
    """
    files = [rank_file(folder, rank).read_text().splitlines()[skipped:] for rank in range(ranks)]
    shortest, longest = min(map(len, files)), max(map(len, files))
    differing = [step for step in zip(*files, strict=False) if len(set(step)) > 1]
    missing = longest - shortest if longest > shortest + 1 else 0
    by_decision = {
        name: sum(len({line.split()[place] for line in step}) > 1 for step in differing)
        for place, name in enumerate(DECISIONS)
    }
    return Comparison(shortest, len(differing) + missing, by_decision)


def steps_written(folder: Path) -> int:
    """How many steps rank 0 has written."""
    path = rank_file(folder, 0)
    return len(path.read_text().splitlines()) if path.exists() else 0
