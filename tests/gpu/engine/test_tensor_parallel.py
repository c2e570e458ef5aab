"""Two ranks answer as one does, from the same trees."""

from pathlib import Path

import pytest

from ops.bench.prompts import PromptSource
from ops.gpu.pairs import HOME
from tests.gpu.engine.fleet import Fleet, ask_all
from tests.gpu.engine.judge import partings, wrong


def prompts(source: PromptSource) -> list[list[int]]:
    picked = [*source.cut("prose", 500, 1), *source.cut("code", 500, 1)]
    return [prompt.tokens.tolist() for prompt in picked]


def trees(name: str) -> list[list[str]]:
    """The digests of the trees that each rank verified, in order."""
    return [Path(HOME, name, f"rank{rank}").read_text().splitlines() for rank in (0, 1)]


@pytest.mark.servers("plain", "ddtree-tp2")
def test_two_ranks_answer_as_one_from_identical_trees(fleet: Fleet, source: PromptSource) -> None:
    references = ask_all(fleet.client("plain"), prompts(source), 96, top_logprobs=3)
    answers = ask_all(fleet.client("ddtree-tp2"), prompts(source), 96)
    assert wrong(partings(answers, references)) == []
    first, second = trees("ddtree-tp2")
    assert len(first) > 100
    assert first == second


@pytest.mark.servers("ddtree-tp2-faulty")
def test_trees_that_differ_between_ranks_are_found(fleet: Fleet, source: PromptSource) -> None:
    ask_all(fleet.client("ddtree-tp2-faulty"), prompts(source)[:2], 16)
    first, second = trees("ddtree-tp2-faulty")
    assert first != second
