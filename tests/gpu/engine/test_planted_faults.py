"""One judgement that a good server passes, and that each planted fault fails.

Prompts of several lengths, five at a time: a server with one graph of eight requests must pad.
"""

from dataclasses import dataclass

import pytest

from ops.bench.prompts import PromptSource
from ops.gpu.client import Client
from ops.gpu.judge import Parting, partings, wrong
from tests.gpu.engine.fleet import FAULTS, Fleet, ask_all, commit_len

TOKENS = 96
AT_ONCE = 5
LEAST_SHARE = 0.95
"""commit_len of a faulty drafter must fall below this share of a good one's."""


@dataclass(frozen=True, slots=True)
class Findings:
    """wrong: answers that rounding does not explain. commit_len: over all answers."""

    wrong: list[Parting]
    commit_len: float


def prompts(source: PromptSource) -> list[list[int]]:
    """Prose and code, from short to longer than the drafter's window of 256 tokens many times."""
    picked = [
        *source.cut("prose", 300, 1)[:3],
        *source.cut("code", 700, 1)[:3],
        *source.cut("prose", 6000, 1)[:3],
        *source.cut("code", 6000, 1)[:3],
    ]
    return [prompt.tokens.tolist() for prompt in picked]


def judge(client: Client, plain: Client, source: PromptSource) -> Findings:
    asked = prompts(source)
    references = ask_all(plain, asked, TOKENS, at_once=AT_ONCE, top_logprobs=3)
    answers = ask_all(client, asked, TOKENS, at_once=AT_ONCE)
    return Findings(wrong(partings(answers, references)), commit_len(answers))


@pytest.fixture(scope="module")
def good(fleet: Fleet, source: PromptSource) -> Findings:
    return judge(fleet.client("ddtree-padded"), fleet.client("plain"), source)


@pytest.mark.servers("plain", "ddtree-padded")
def test_nothing_is_wrong_where_nothing_is_planted(good: Findings) -> None:
    print(good)
    assert good.wrong == []
    assert good.commit_len > 2.0


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.servers("plain", "ddtree-padded", f"faulty-{fault}"))
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_found(
    fleet: Fleet, source: PromptSource, good: Findings, fault: str
) -> None:
    found = judge(fleet.client(f"faulty-{fault}"), fleet.client("plain"), source)
    print(fault, found, "good:", good.commit_len)
    assert found.wrong or found.commit_len < LEAST_SHARE * good.commit_len
