"""The numpy forward against reference logits, float32, on the shipped models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longleaf.embedded.config import DrafterConfig
from longleaf.embedded.drafter import DraftAnchor, Drafter
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.target import Segment, Target, TargetOutput

GOLDEN = Path(__file__).parent / "golden"
LIMIT = 1e-3
"""Relative error that the issue allows; bf16 weights are widened alike, so 1e-5 is usual."""


def golden(name: str) -> list[Mapping[str, Any]]:
    """One mapping a prompt: the file's arrays ``field_n`` as ``field``."""
    with np.load(GOLDEN / f"{name}.npz") as stored:
        prompts: dict[str, dict[str, Any]] = {}
        for key in stored:
            field, _, number = key.rpartition("_")
            if field:
                prompts.setdefault(number, {})[field] = stored[key]
    return list(prompts.values())


def relative_error(ours: Any, theirs: Any) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.fixture(scope="module")
def target() -> Target:
    taps = DrafterConfig.load(DEFAULT_MODELS / "tiny-drafter").taps
    return Target.load(DEFAULT_MODELS / "tiny-target", taps)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return Drafter.load(DEFAULT_MODELS / "tiny-drafter", target)


def run(target: Target, tokens: Any, pool: KvPool) -> TargetOutput:
    rows = np.arange(len(tokens))
    return target.forward([Segment(tokens, rows, rows, rows[:0])], pool)


@pytest.mark.parametrize("expanded", [True, False])
def test_target_matches_the_reference(target: Target, expanded: bool) -> None:
    prompts = golden("target")
    assert len(prompts) >= 3
    for prompt in prompts:
        pool = KvPool(target.config, None, len(prompt["tokens"]), expanded)
        output = run(target, prompt["tokens"], pool)
        logits = target.logits(output.hidden[prompt["positions"]])
        assert relative_error(logits, prompt["logits"]) < LIMIT
        assert (logits.argmax(1) == prompt["logits"].argmax(1)).all()


def test_drafter_matches_the_reference(target: Target, drafter: Drafter) -> None:
    prompts = golden("drafter")
    assert max(p["anchors"].max() for p in prompts) > drafter.config.sliding_window
    for prompt in prompts:
        tokens = prompt["tokens"]
        pool = KvPool(target.config, drafter.config, len(tokens))
        slots = np.arange(len(tokens))
        drafter.extend(run(target, tokens, pool).features, slots, slots, pool)
        anchors = [DraftAnchor(int(tokens[a]), int(a), slots[:a]) for a in prompt["anchors"]]
        output = drafter.draft(anchors, pool)
        assert output.logits.shape == prompt["logits"].shape
        assert relative_error(output.logits, prompt["logits"]) < LIMIT
