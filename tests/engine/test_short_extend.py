"""Short extends through verify graphs: rows, slots and answers, over a model of integers."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.managers.cache_controller import LayerDoneCounter  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import (  # noqa: E402
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.utils.device_timer import DeviceTimer, device_timer_ctx  # noqa: E402

from longleaf.engine.short_extend import ShortExtends, chain_rows  # noqa: E402
from longleaf.engine.widths import VerifyRunner, VerifyRunners  # noqa: E402

VOCABULARY = 97
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 8, 2, 8, 1, 8]]
PREFIXES = [6, 0, 5]


def next_token(tokens: list[int], position: int) -> int:
    """What the model of integers says after these tokens; it sees all, and its position."""
    value = position
    for token in tokens:
        value = (31 * value + token) % VOCABULARY
    return value


class IntegerGraphs:
    """Verify graphs of one width, over a cache of one integer a slot."""

    def __init__(self, width: int, cache: Any, table: Any, max_bs: int = 4) -> None:
        self.captured_req_width, self.max_bs = width, max_bs
        self.cache, self.table = cache, table
        self.runs = 0

    def execute(self, batch: Any) -> LogitsProcessorOutput:
        self.runs += 1
        assert batch.forward_mode == ForwardMode.TARGET_VERIFY
        assert batch.spec_info.num_tokens_per_req == self.captured_req_width
        assert batch.spec_info.custom_mask is None
        rows = batch.batch_size * self.captured_req_width
        assert len(batch.input_ids) == len(batch.positions) == len(batch.out_cache_loc) == rows
        self.cache[batch.out_cache_loc] = batch.input_ids
        logits = torch.zeros(rows, VOCABULARY)
        hidden = torch.zeros(rows, 2)
        for row in range(rows):
            request, node = divmod(row, self.captured_req_width)
            slots = self.table[batch.req_pool_indices[request], : int(batch.seq_lens[request])]
            seen = self.cache[slots].tolist()
            first = request * self.captured_req_width
            seen += batch.input_ids[first : first + node + 1].tolist()
            logits[row, next_token(seen, int(batch.positions[row]))] = 1
            hidden[row] = torch.tensor([float(batch.input_ids[row]), float(batch.positions[row])])
        assert int(batch.seq_lens_cpu.min()) >= self.captured_req_width
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)


def world(widths: tuple[int, ...] = (1, 4, 8)) -> Any:
    """A cache that holds the prefixes of PROMPTS, and graphs over it."""
    cache = torch.full((64,), -1)
    table = torch.zeros(8, 16, dtype=torch.int64)
    pool_rows = torch.tensor([5, 2, 7])
    free = iter(torch.randperm(63).add(1).tolist())  # no slot 0: it is padding's
    for row, prompt in zip(pool_rows, PROMPTS, strict=True):
        for at in range(len(prompt)):
            table[row, at] = next(free)
    for row, prompt, prefix in zip(pool_rows, PROMPTS, PREFIXES, strict=True):
        cache[table[row, :prefix]] = torch.tensor(prompt[:prefix], dtype=torch.int64)
    runner: Any = SimpleNamespace(
        war_fastpath_read_done_event="an event of before",
        device_timer=None,
        token_to_kv_pool=SimpleNamespace(layer_transfer_counter=None),
    )
    runners = VerifyRunners(runner)
    graphs = {width: IntegerGraphs(width, cache, table) for width in widths}
    runners._runners = {width: VerifyRunner(f"backend {width}", graphs[width]) for width in widths}
    lengths = [len(p) - n for p, n in zip(PROMPTS, PREFIXES, strict=True)]
    slots = [table[r, n : len(p)] for r, p, n in zip(pool_rows, PROMPTS, PREFIXES, strict=True)]
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(PROMPTS),
        input_ids=torch.tensor([t for p, n in zip(PROMPTS, PREFIXES, strict=True) for t in p[n:]]),
        req_pool_indices=pool_rows,
        seq_lens=torch.tensor([len(p) for p in PROMPTS]),
        out_cache_loc=torch.cat(slots),
        seq_lens_sum=sum(len(p) for p in PROMPTS),
        positions=torch.cat(
            [torch.arange(n, len(p)) for p, n in zip(PROMPTS, PREFIXES, strict=True)]
        ),
        extend_prefix_lens=torch.tensor(PREFIXES, dtype=torch.int32),
        extend_prefix_lens_cpu=PREFIXES,
        extend_seq_lens_cpu=lengths,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    return SimpleNamespace(
        batch=batch, cache=cache, table=table, graphs=graphs, runner=runner,
        extends=ShortExtends(runner, runners), pool_rows=pool_rows,
    )  # fmt: skip


def test_an_extend_says_and_writes_what_its_tokens_do() -> None:
    made = world()
    before = made.batch.input_ids.clone()
    assert made.extends.can_run_graph(made.batch)
    output = made.extends.execute(made.batch)
    assert made.graphs[4].runs == 1
    assert made.runner.attn_backend == "backend 4"
    said = output.next_token_logits.argmax(-1).tolist()
    assert said == [next_token(prompt, len(prompt) - 1) for prompt in PROMPTS]
    for row, prompt in zip(made.pool_rows, PROMPTS, strict=True):
        assert made.cache[made.table[row, : len(prompt)]].tolist() == prompt
    assert output.hidden_states[:, 0].tolist() == before.tolist()
    assert output.hidden_states[:, 1].tolist() == made.batch.positions.tolist()
    used = {0, *made.table.flatten().tolist()}
    untouched = [slot for slot in range(64) if slot not in used]
    assert (made.cache[untouched] == -1).all()
    assert made.batch.forward_mode == ForwardMode.EXTEND
    assert torch.equal(made.batch.input_ids, before)
    assert made.runner.war_fastpath_read_done_event is None


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, False),
        ({"forward_mode": ForwardMode.MIXED}, False),
        ({"return_logprob": True}, False),
        ({"capture_hidden_mode": CaptureHiddenMode.NULL}, False),
        ({"extend_seq_lens_cpu": [2, 2, 9]}, False),
        ({"extend_seq_lens_cpu": [0, 2, 3]}, False),
        ({"input_ids": torch.zeros(8, dtype=torch.int64)}, False),
        ({"lora_ids": [None, "an adapter", None]}, False),
        ({"lora_ids": [None, None, None], "mm_inputs": [None, None, None]}, True),
        ({"mm_inputs": [None, "an image", None]}, False),
        ({"global_num_tokens_cpu": [5, 5]}, False),
    ],
)
def test_what_a_graph_cannot_do_stays_with_sglang(changes: dict[str, Any], runs: bool) -> None:
    made = world()
    for name, value in changes.items():
        setattr(made.batch, name, value)
    assert made.extends.can_run_graph(made.batch) is runs


def test_a_batch_larger_than_any_graph_stays_with_sglang() -> None:
    made = world()
    for graphs in made.graphs.values():
        graphs.max_bs = 2
    assert not made.extends.can_run_graph(made.batch)


def test_a_batch_of_mostly_padding_stays_with_sglang() -> None:
    made = world((8, 64))
    made.batch.extend_seq_lens_cpu = [33, 1, 1]
    made.batch.input_ids = torch.zeros(35, dtype=torch.int64)
    assert not made.extends.can_run_graph(made.batch)  # 192 rows for 35 tokens
    made.batch.extend_seq_lens_cpu = [33, 1, 15]
    made.batch.input_ids = torch.zeros(49, dtype=torch.int64)
    assert made.extends.can_run_graph(made.batch)


class OtherCounter:
    """Like LMCache's: it loads a layer when it is waited for, and does not say whether it will."""

    def wait_until(self, threshold: int) -> None:
        del threshold


def test_a_prefix_that_layers_load_stays_with_sglang() -> None:
    made = world()
    counter = object.__new__(LayerDoneCounter)
    made.runner.token_to_kv_pool.layer_transfer_counter = counter
    for consumer, runs in ((0, False), (2, False), (-1, True)):
        counter.set_consumer(consumer)
        assert made.extends.can_run_graph(made.batch) is runs
    made.runner.token_to_kv_pool.layer_transfer_counter = OtherCounter()
    assert not made.extends.can_run_graph(made.batch)


class Event:
    """CUDA's, without CUDA."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


def test_sglangs_device_timer_runs_once_around_an_extend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = world()
    timer = made.runner.device_timer = DeviceTimer(lambda **_: None)
    graphs = made.graphs[4]
    run = graphs.execute

    def timed(batch: Any) -> Any:
        with device_timer_ctx(made.runner.device_timer, "target_verify"):
            return run(batch)

    graphs.execute = timed
    with device_timer_ctx(made.runner.device_timer, "extend"):
        made.extends.execute(made.batch)
    assert graphs.runs == 1
    assert made.runner.device_timer is timer


def test_rows_of_a_layout() -> None:
    rows = chain_rows([2, 1], 3, "cpu")
    assert rows.source.tolist() == [0, 1, 1, 2, 2, 2]
    assert rows.filler.tolist() == [False, False, True, False, True, True]
    assert rows.tokens.tolist() == [0, 1, 3]
    assert rows.last.tolist() == [1, 3]
    for lengths in ([], [0, 1], [4]):
        with pytest.raises(ValueError, match="1 to 3 tokens fit"):
            chain_rows(lengths, 3, "cpu")
