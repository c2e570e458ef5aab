"""How much a step commits, against the embedded engine's values on the same prompts."""

import pytest

from longleaf.metrics import CONTEXT_BUCKETS
from ops.bench.prompts import PromptSource
from ops.gpu.client import Generation
from ops.gpu.metrics import counters
from ops.gpu.reference import lossless_set, prompt_sets
from tests.gpu.engine.fleet import Fleet, ask_all, commit_len, embedded, embedded_commit_len

SETS = ("predictable_1k", "predictable_8k", "prose_1k", "code_1k")


def answers(fleet: Fleet, server: str, source: PromptSource, kind: str) -> list[Generation]:
    prompts = next(item for item in prompt_sets(source) if item.name == kind)
    tokens = [prompt.tokens.tolist() for prompt in prompts.prompts]
    return ask_all(fleet.client(server), tokens, prompts.tokens, at_once=4)


@pytest.mark.servers("ddtree")
@pytest.mark.parametrize("kind", SETS)
def test_commit_len_is_the_embedded_engines(fleet: Fleet, source: PromptSource, kind: str) -> None:
    """Over answers of the same text: one that parts by rounding goes on with other text."""
    entry = embedded()["tree"][kind]
    found = answers(fleet, "ddtree", source, kind)
    same = [i for i, answer in enumerate(found) if list(answer.tokens) == entry["tokens"][i]]
    measured = commit_len([found[i] for i in same])
    expected = sum(entry["committed"][i] for i in same) / sum(entry["steps"][i] for i in same)
    print(
        f"{kind}: {len(same)} of {len(found)} answers alike, commit_len {measured:.3f}, embedded "
        f"{expected:.3f}; over all {commit_len(found):.3f}, {embedded_commit_len(kind):.3f}"
    )
    assert len(same) >= len(found) // 2
    assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.servers("ddtree")
def test_commit_len_of_fifty_prompts_is_the_embedded_engines(
    fleet: Fleet, source: PromptSource
) -> None:
    prompts = lossless_set(source)
    tokens = [prompt.tokens.tolist() for prompt in prompts.prompts]
    measured = commit_len(ask_all(fleet.client("ddtree"), tokens, prompts.tokens, at_once=4))
    expected = embedded_commit_len(prompts.name)
    print(f"fifty prompts: commit_len {measured:.3f}, embedded {expected:.3f}")
    assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.servers("ddtree")
@pytest.mark.parametrize("kind", ["predictable_1k", "predictable_8k"])
def test_predictable_text_commits_five_tokens_a_step(
    fleet: Fleet, source: PromptSource, kind: str
) -> None:
    assert commit_len(answers(fleet, "ddtree", source, kind)) >= 5.0


@pytest.mark.servers("ddtree", "chain")
@pytest.mark.parametrize("kind", ["prose_1k", "code_1k"])
def test_a_tree_commits_more_than_a_chain(fleet: Fleet, source: PromptSource, kind: str) -> None:
    tree, chain = (commit_len(answers(fleet, name, source, kind)) for name in ("ddtree", "chain"))
    print(f"{kind}: tree {tree:.3f}, chain {chain:.3f}")
    assert tree >= 1.10 * chain


@pytest.mark.servers("ddtree")
def test_metrics_count_what_usage_counts(fleet: Fleet, source: PromptSource) -> None:
    """One observation a step and request; accepted depth + 1 is the commit length."""
    client = fleet.client("ddtree")
    before = counters(client)
    found = answers(fleet, "ddtree", source, "code_1k")
    after = counters(client)

    def grown(name: str) -> float:
        return sum(after.get(name, bucket) - before.get(name, bucket) for bucket in CONTEXT_BUCKETS)

    steps = sum(answer.steps for answer in found)
    committed = grown("longleaf_commit_len_sum")
    assert grown("longleaf_commit_len_count") == steps
    assert grown("longleaf_accepted_depth_count") == steps
    assert grown("longleaf_accepted_depth_sum") == committed - steps
    assert grown("longleaf_tree_nodes_sum") == 16 * steps
    # The last step of an answer may commit more than max_tokens leaves room for.
    tokens = sum(len(answer.tokens) - 1 for answer in found)
    assert tokens <= committed <= tokens + 7 * len(found)
