"""Node counts: which are captured, how their graphs are put in place, how ranks agree on one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from longleaf.engine import widths
from longleaf.engine.options import EngineOptions, captured_nodes, read_options
from longleaf.engine.widths import VerifyRunner, VerifyRunners, WidthPolicy, make_budget


def test_captured_node_counts_follow_the_server_unless_options_say_otherwise() -> None:
    assert captured_nodes(EngineOptions(), None) == (1, 8, 16, 32, 64)
    assert captured_nodes(EngineOptions(), 9) == (1, 8, 9)
    assert captured_nodes(EngineOptions(), 8) == (1, 8)
    assert captured_nodes(EngineOptions(nodes=(64, 1)), 64) == (1, 64)
    with pytest.raises(ValueError, match="below the most nodes"):
        captured_nodes(EngineOptions(nodes=(32,)), 16)


def test_options_come_from_one_variable() -> None:
    assert read_options({}) == EngineOptions()
    text = '{"nodes": [9], "grammar_nodes": 8, "step_ms": [[9, 1024, 6.5]]}'
    options = read_options({"LONGLEAF_ENGINE": text})
    assert options == EngineOptions(nodes=(9,), grammar_nodes=8, step_ms=((9, 1024, 6.5),))
    assert EngineOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[9]", "JSON object"),
        ("{", "JSON object"),
        ('{"node": [9]}', "no option 'node'"),
        ('{"nodes": 9}', "list of integers"),
        ('{"nodes": [true]}', "list of integers"),
        ('{"nodes": [0]}', "from 1 to 128"),
        ('{"nodes": [129]}', "from 1 to 128"),
        ('{"nodes": [9, 9]}', "must differ"),
        ('{"seed_chain": 1}', "of type bool"),
        ('{"grammar_nodes": 0}', "at least 1"),
        ('{"sample_phases": -1}', "not be negative"),
        ('{"step_ms": [[9, 1024]]}', "milliseconds"),
    ],
)
def test_options_that_say_nothing_sensible_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_options({"LONGLEAF_ENGINE": text})


def test_ranks_that_are_told_the_same_choose_the_same() -> None:
    generator = random.Random(5)
    nodes = (1, 8, 16, 32, 64)
    ranks = [WidthPolicy(nodes, 16, make_budget(nodes, 7, 61)) for _ in range(4)]
    chosen = set()
    for step in range(600):
        contexts = [generator.randrange(1, 150_000) for _ in range(1 + step % 3)]
        picks = {rank.choose(contexts, has_grammar=False) for rank in ranks}
        assert len(picks) == 1
        (width,) = picks
        chosen.add(width)
        predictable = step // 200 == 1
        drafts = [min(width - 1, 7 if predictable else generator.randrange(2)) for _ in contexts]
        paths = [list(range(count + 1)) for count in drafts]
        for rank in ranks:
            rank.observe(width, drafts, paths)
    assert len(chosen) > 1
    assert chosen <= set(nodes)


def test_constrained_requests_keep_a_batch_narrow() -> None:
    fixed = WidthPolicy((8, 64), 16, make_budget((8, 64), 7, 61))
    assert fixed.choose([100], has_grammar=True) == 8
    assert WidthPolicy((64,), 16, None).choose([100], has_grammar=True) == 64
    assert WidthPolicy((64,), 16, None).choose([100], has_grammar=False) == 64
    with pytest.raises(ValueError, match="need a budget"):
        WidthPolicy((8, 64), 16, None)


class Runner:
    """The attributes of SGLang's model runner that graphs are made and kept by."""

    def __init__(self) -> None:
        self.attn_backend: Any = "backend of SGLang"
        self.decode_cuda_graph_runner: Any = "graphs of SGLang"
        self.init_new_workspace = False
        self.made: list[tuple[int, str]] = []
        self.width = 64
        self.rows_off = 0

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        self.init_new_workspace = init_new_workspace
        return f"backend {self.width}"

    def _decode_cuda_graph_runner_cls(self) -> Any:
        def make(runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int) -> Any:
            assert runner.attn_backend == attn_backend
            self.made.append((speculative_num_draft_tokens, attn_backend))
            rows = speculative_num_draft_tokens + self.rows_off
            return SimpleNamespace(captured_req_width=rows, max_bs=8)

        return make


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    made = Runner()

    @contextmanager
    def spec_width(tokens: int, otherwise: int) -> Iterator[None]:
        made.width = tokens
        yield
        made.width = otherwise

    monkeypatch.setattr(widths, "spec_width", spec_width)
    return made


def test_every_node_count_but_sglangs_own_is_captured_with_a_backend(runner: Runner) -> None:
    runners = VerifyRunners(runner)
    runners.build((1, 8, 64), captured=64, graphs=True)
    assert runner.made == [(8, "backend 8"), (1, "backend 1")]
    assert runner.width == 64
    assert runner.attn_backend == "backend of SGLang"
    assert runner.init_new_workspace is False
    runners.activate(8)
    assert runner.attn_backend == "backend 8"
    assert runner.decode_cuda_graph_runner.captured_req_width == 8
    runners.activate(64)
    assert runner.decode_cuda_graph_runner == "graphs of SGLang"
    assert set(runners.attn_backends) == {"backend of SGLang", "backend 8", "backend 1"}
    runner_of_64 = SimpleNamespace(captured_req_width=64, max_bs=4)
    runners._runners[64] = VerifyRunner("backend of SGLang", runner_of_64)
    assert [runners.holding(count, 4) for count in (1, 2, 8, 9, 64)] == [1, 8, 8, 64, 64]
    assert runners.holding(65, 1) is None
    assert runners.holding(9, 8) is None
    assert runners.holding(2, 8) == 8
    assert runners.holding(2, 9) is None
    with pytest.raises(KeyError):
        runners.activate(9)


def test_without_graphs_one_backend_serves_all(runner: Runner) -> None:
    runners = VerifyRunners(runner)
    runners.build((1, 8), captured=8, graphs=False)
    assert runner.made == []
    assert runners.attn_backends == ("backend of SGLang",)


def test_graphs_of_another_width_are_refused(runner: Runner) -> None:
    runner.rows_off = 1
    with pytest.raises(RuntimeError, match="not 1"):
        VerifyRunners(runner).build((1, 8), captured=8, graphs=True)
    assert runner.attn_backend == "backend of SGLang"
