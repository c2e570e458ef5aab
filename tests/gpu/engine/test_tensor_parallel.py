"""Two ranks answer as one does, from the same trees, paths and tokens."""

from contextlib import suppress

import pytest

from ops.bench.prompts import PromptSource
from ops.gpu.client import EngineError
from ops.gpu.judge import partings, wrong
from ops.gpu.ranks import compare
from tests.gpu.engine.fleet import Fleet, ask_all, ranks_folder


def prompts(source: PromptSource) -> list[list[int]]:
    picked = [*source.cut("prose", 500, 1), *source.cut("code", 500, 1)]
    return [prompt.tokens.tolist() for prompt in picked]


@pytest.mark.servers("plain", "ddtree-tp2")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_ranks_decide_as_one(fleet: Fleet, source: PromptSource, temperature: float) -> None:
    client = fleet.client("ddtree-tp2")
    asked = prompts(source)
    answers = [  # two at a time: all at once take few steps
        answer
        for first in range(0, len(asked), 2)
        for answer in ask_all(client, asked[first : first + 2], 96, temperature=temperature)
    ]
    if temperature == 0.0:
        references = ask_all(fleet.client("plain"), prompts(source), 96, top_logprobs=3)
        assert wrong(partings(answers, references)) == []
    found = compare(ranks_folder("ddtree-tp2"), 2)
    print(found)
    assert found.steps > 100
    assert found.mismatched == 0


@pytest.mark.servers("ddtree-tp2-faulty")
def test_ranks_that_differ_are_found(fleet: Fleet, source: PromptSource) -> None:
    # Ranks that part may wait for one another for ever.
    with suppress(EngineError, OSError):
        ask_all(fleet.client("ddtree-tp2-faulty"), prompts(source)[:2], 16, timeout=20)
    found = compare(ranks_folder("ddtree-tp2-faulty"), 2)
    assert found.by_decision["trees"] > 0
