"""The trials of ``longleaf preflight`` that need torch, as far as a CPU goes."""

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from longleaf.engine.preflight_kernel import visible_bits
from longleaf.probes.preflight.expected import Expected
from longleaf.probes.preflight.facts import Facts, Gpu
from longleaf.probes.preflight.trials import Trials
from longleaf.probes.preflight.verdict import CheckError

ROOT = Path(__file__).parents[2]
GPUS = tuple(Gpu(index, "any", (12, 0), None, None, "580") for index in range(3))
FACTS = Facts(GPUS, None, None)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((f"{ROOT}/service", f"{ROOT}/kernels")))


def test_three_ranks_reduce_to_the_right_sum() -> None:
    trials = Trials(backend="gloo")
    said = trials.check_nccl(FACTS, Expected(gpus=3, nccl_seconds=200.0))
    assert said.startswith("right over 3 ranks"), said


def test_a_kernel_that_cannot_run_says_why() -> None:
    with pytest.raises(CheckError, match="cannot run") as caught:
        Trials().check_kernel(FACTS, Expected(kernel_seconds=200.0))
    assert "make kernels" in caught.value.fix


def test_nodes_see_their_ancestors() -> None:
    assert visible_bits([-1, 0, 1, 0]) == [0b1, 0b11, 0b111, 0b1001]
