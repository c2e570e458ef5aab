"""A whole decode step over a world that checks what the step reads and writes.

The traps, each planted once: the check that would be blind to one is no check.
"""

from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative import dflash_worker_v2  # noqa: E402

from longleaf.engine import accept, verify_input, worker  # noqa: E402
from longleaf.engine.accept import Acceptor  # noqa: E402
from longleaf.engine.compaction import TargetCompactor  # noqa: E402
from longleaf.engine.draft_head import MarginalHead, Shard  # noqa: E402
from longleaf.engine.metrics import PhaseClock, StepLedger  # noqa: E402
from longleaf.engine.options import EngineOptions  # noqa: E402
from longleaf.engine.penalties import Penalties  # noqa: E402
from longleaf.engine.verify_input import RootTrees  # noqa: E402
from longleaf.engine.widths import WidthPolicy  # noqa: E402
from longleaf.engine.worker import DDTreeWorker  # noqa: E402
from tests.engine.emulated import emulated_library, kernels  # noqa: E402, F401
from tests.engine.worlds import (  # noqa: E402
    MASK_TOKEN,
    VOCABULARY,
    World,
    continuation,
    draft_block,
    extend_slots,
    next_token,
    rebuild_window,
    rival_token,
)

pytestmark = pytest.mark.usefixtures("kernels")
BLOCK = 8
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [1, 6, 1, 8, 0, 3, 9]]


class OneWidth:
    """The runners of a world without graphs."""

    def __init__(self) -> None:
        self.active = 0

    def activate(self, nodes: int) -> None:
        self.active = nodes


class Scripted:
    """A budget that goes through its widths in turn."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self.told: list[tuple[int, list[int], list[list[int]]]] = []

    def choose(self, context: int, batch: int) -> int:
        del context, batch
        self.widths.append(self.widths.pop(0))
        return self.widths[-1]

    def observe(self, width: int, accepted: Sequence[int], paths: Any = None) -> None:
        self.told.append((width, list(accepted), paths))


def make_worker(world: World, nodes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker around a world, built without SGLang's loading of models."""
    made = object.__new__(DDTreeWorker)
    monkeypatch.setattr(worker, "assign_extend_cache_locs_func", extend_slots)
    monkeypatch.setattr(worker, "_prepare_dflash_draft_block_unchecked", draft_block)
    monkeypatch.setattr(torch, "get_device_module", fake_device_module)
    monkeypatch.setattr(dflash_worker_v2, "rebuild_compact_draft_req_to_token_func", rebuild_window)
    calls = iter(range(10_000))

    def prepare(self: Any, batch: Any, target_worker: Any) -> tuple[Any, bool]:
        del target_worker
        return SimpleNamespace(spec=self, slots=batch.out_cache_loc, lens=batch.seq_lens), False

    def verify(*, batch: None, forward_batch: Any, **flags: bool) -> Any:
        assert batch is None
        assert flags == {"is_verify": True, "skip_attn_backend_init": True}
        return world.verify(forward_batch.spec, forward_batch.slots, forward_batch.lens)

    def append(
        target_hidden: Any, cache_loc: Any, cache_loc_2d: Any, positions: Any, commit_lens: Any
    ) -> None:
        assert cache_loc.tolist() == cache_loc_2d.view(-1).tolist()
        world.append_draft_kv(target_hidden, cache_loc_2d, positions, commit_lens)

    monkeypatch.setattr(verify_input.DDTreeVerifyInput, "prepare_for_verify", prepare)
    embeddings = torch.zeros(VOCABULARY, 4)
    model = SimpleNamespace(get_input_embeddings=lambda: lambda ids: embeddings[ids])
    values: dict[str, Any] = {
        "block_size": BLOCK,
        "device": "cpu",
        "use_compact_draft_cache": world.window is not None,
        "draft_window_size": world.window,
        "page_size": 1,
        "_use_triton_compact_rebuild": True,
        "_mask_token_id": MASK_TOKEN,
        "_draft_sampler": None,
        "_draft_block_ids_buf": None,
        "_draft_block_spec_info": None,
        "_options": EngineOptions(nodes=tuple(nodes)),
        "_nodes": tuple(nodes),
        "_policy": WidthPolicy(nodes, 16, Scripted(nodes) if len(nodes) > 1 else None),
        "_runners": OneWidth(),
        "_clock": PhaseClock(1),
        "_ledger": StepLedger(),
        "_compactor": TargetCompactor(),
        "_observer": None,
        "_head": MarginalHead(
            Shard(torch.eye(VOCABULARY), 0, VOCABULARY), BLOCK, max(1, max(nodes) - 1), 4
        ),
        "_acceptor": Acceptor(4, max(nodes), 0, "cpu"),
        "_roots": RootTrees(4, "cpu"),
        "_penalties": Penalties(len(world.req_to_token), BLOCK, "cpu"),
        "model_runner": SimpleNamespace(
            model=model,
            req_to_token_pool=SimpleNamespace(req_to_token=world.req_to_token),
            token_to_kv_pool=SimpleNamespace(kv_buffer=world.layers),
        ),
        "draft_model_runner": SimpleNamespace(
            forward=lambda batch: world.draft(batch, BLOCK, next(calls)),
            req_to_token_pool=SimpleNamespace(req_to_token=world.draft_table),
        ),
        "_target_worker": SimpleNamespace(forward_batch_generation=verify),
        "_append_target_hidden_to_draft_kv_by_loc": append,
    }
    for name, value in values.items():
        setattr(made, name, value)
    return made


def fake_device_module(device: Any) -> Any:
    del device
    return SimpleNamespace(current_stream=lambda: None)


class Lengths(torch.Tensor):  # type: ignore[name-defined,misc]
    """Lengths on a CPU, where nothing is recorded."""

    def record_stream(self, stream: Any) -> None:
        del stream


def request_of(
    length: int, prompt: Sequence[int] = (), output: Sequence[int] = (), **asked: Any
) -> Any:
    """A request of SGLang's, as far as a step looks at it."""
    return SimpleNamespace(
        kv_committed_len=length,
        finished=lambda: False,
        is_retracted=False,
        origin_input_ids=array("q", prompt),
        output_ids=array("q", output),
        sampling_params=SamplingParams(**asked),
        tokenizer=None,
    )


def batch_of(world: World, made: Any, sampling_info: Any = None, **fields: Any) -> Any:
    lengths = world.prefix_lens().as_subclass(Lengths)
    roots = torch.tensor([sequence[-1] for sequence in world.sequences])
    values: dict[str, Any] = {
        "forward_mode": SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False),
        "is_extend_in_batch": False,
        "seq_lens": lengths,
        "seq_lens_cpu": lengths.clone(),
        "seq_lens_sum": int(lengths.sum()),
        "req_pool_indices": torch.arange(1, world.requests + 1),
        "reqs": [request_of(int(length)) for length in lengths],
        "has_grammar": False,
        "return_logprob": False,
        "sampling_info": sampling_info,
        "spec_info": made._make_next_draft_input_decode(bonus_tokens=roots, new_seq_lens=lengths),
    }
    return SimpleNamespace(**values | fields)


def step(world: World, made: Any, **fields: Any) -> list[list[int]]:
    """One decode step; returns what each request commits."""
    published: list[Any] = []
    batch = batch_of(world, made, **fields)
    before = batch.seq_lens_cpu.tolist()
    result = made.forward_batch_generation(batch, on_publish=published.append)
    assert batch.seq_lens_cpu.tolist() == before
    assert result.speculative_num_draft_tokens == BLOCK
    tokens = result.next_token_ids.view(-1, BLOCK)
    lengths = result.accept_lens.tolist()
    taken = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    for request, run in enumerate(taken):
        world.sequences[request].extend(run)
    assert published[0].tolist() == world.prefix_lens().tolist()
    assert result.new_seq_lens.tolist() == world.prefix_lens().tolist()
    roots = [sequence[-1] for sequence in world.sequences]
    assert result.next_draft_input.bonus_tokens.tolist() == roots
    assert result.logits_output.hidden_states is None
    made.on_verify_complete_cpu([length - 1 for length in lengths], batch_size=len(lengths))
    return taken


def run(world: World, made: Any, steps: int) -> list[int]:
    """Steps whose every token must be plain decoding's; returns the committed lengths."""
    lengths = []
    for _ in range(steps):
        truth = [continuation(sequence, BLOCK) for sequence in world.sequences]
        for taken, expected in zip(step(world, made), truth, strict=True):
            assert taken == expected[: len(taken)]
            lengths.append(len(taken))
        for layer in range(len(world.layers)):
            for request, length in enumerate(world.prefix_lens().tolist()):
                tokens = world.sequence(layer, request, length)
                assert tokens == world.sequences[request][:-1]
    return lengths


@pytest.mark.parametrize("nodes", [1, 2, 8, 9, 16, 70])
def test_greedy_steps_commit_what_plain_decoding_gives(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(PROMPTS, room=200)
    lengths = run(world, make_worker(world, [nodes], monkeypatch), 6 if nodes < 64 else 3)
    if nodes == 1:
        assert set(lengths) == {1}
    if nodes >= 16:
        assert max(lengths) > 2, "the trees were never of use"


def test_widths_change_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=200)
    made = make_worker(world, [1, 8, 16, 64], monkeypatch)
    run(world, made, 8)
    told = made._policy._budget.told
    assert [width for width, _, _ in told] == [1, 8, 16, 64] * 2
    for width, accepted, paths in told:
        for drafts, path in zip(accepted, paths, strict=True):
            assert path[0] == 0
            assert len(path) == drafts + 1
            assert max(path) < width


def greedy_and_sampled() -> Any:
    return SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.ones(3, 1),
        top_ps=torch.ones(3),
        top_ks=torch.tensor([1, 1 << 30, 1], dtype=torch.int32),
        min_ps=torch.zeros(3),
        sampling_seed=None,
        has_custom_logit_processor=False,
        acc_linear_penalties=None,
        penalizer_orchestrator=None,
        grammar_mask=None,
        logit_bias=None,
    )


class Sampling(SimpleNamespace):
    def __len__(self) -> int:
        return 3


def test_greedy_requests_stay_greedy_beside_sampled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=400)
    made = make_worker(world, [16], monkeypatch)
    info = Sampling(**vars(greedy_and_sampled()))
    strays = 0
    for _ in range(6):
        truth = [continuation(sequence, BLOCK) for sequence in world.sequences]
        taken = step(world, made, sampling_info=info)
        for request in (0, 2):
            assert taken[request] == truth[request][: len(taken[request])]
        strays += taken[1] != truth[1][: len(taken[1])]
    assert strays < 6  # logit 9 of 32 tokens: nearly always the rule's token


def causal(trees: Any) -> Any:
    nodes = trees.tokens.shape[1]
    rows = torch.tensor([(1 << (node + 1)) - 1 for node in range(nodes)]).view(1, nodes, 1)
    return trees._replace(visible=rows.expand_as(trees.visible))


def by_row(trees: Any) -> Any:
    nodes = trees.tokens.shape[1]
    return trees._replace(positions=trees.positions[:, :1] + torch.arange(nodes))


@pytest.mark.parametrize("plant", [causal, by_row])
def test_a_wrong_mask_or_position_is_caught(
    plant: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(PROMPTS, room=200)
    made = make_worker(world, [16], monkeypatch)
    real = verify_input.verify_input
    monkeypatch.setattr(worker, "verify_input", lambda trees: real(plant(trees)))
    with pytest.raises(AssertionError):
        run(world, made, 6)


def test_draft_kv_that_is_not_cropped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=200)
    made = make_worker(world, [16], monkeypatch)
    real = made._append_target_hidden_to_draft_kv_by_loc

    def all_rows(**given: Any) -> None:
        given["commit_lens"] = torch.full_like(given["commit_lens"], BLOCK)
        real(**given)

    made._append_target_hidden_to_draft_kv_by_loc = all_rows
    with pytest.raises(AssertionError):
        run(world, made, 6)


def test_rows_that_are_not_compacted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=200)
    made = make_worker(world, [16], monkeypatch)
    made._compactor = lambda *given: None
    with pytest.raises(AssertionError):
        run(world, made, 6)


def test_hidden_states_that_are_not_gathered_by_path_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(PROMPTS, room=200)
    made = make_worker(world, [16], monkeypatch)
    real = accept.committed

    def first_rows(*given: Any) -> accept.Committed:
        done = real(*given)
        spine = torch.arange(BLOCK) + torch.arange(done.rows.shape[0]).view(-1, 1) * 16
        return done._replace(rows=spine)

    monkeypatch.setattr(worker, "committed", first_rows)
    with pytest.raises(AssertionError):
        run(world, made, 6)


def test_the_drafter_sees_its_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=200, window=4)
    run(world, make_worker(world, [1, 16], monkeypatch), 8)


def test_a_window_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=200, window=4)
    made = make_worker(world, [16], monkeypatch)
    made.use_compact_draft_cache = False
    with pytest.raises(AssertionError):
        run(world, made, 6)


def test_steps_without_lengths_on_the_host_use_what_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(PROMPTS, room=200, window=4)
    made = make_worker(world, [16], monkeypatch)
    batch = batch_of(world, made, seq_lens_cpu=None, seq_lens_sum=None)
    reserved = torch.tensor([60, 61, 62], dtype=torch.int32)
    batch.spec_info.reserved_seq_lens_cpu = reserved
    batch.spec_info.reserved_seq_lens_sum = 183
    seen: list[Any] = []
    prepare = verify_input.DDTreeVerifyInput.prepare_for_verify

    def note(self: Any, batch: Any, target_worker: Any) -> Any:
        seen.append((batch.seq_lens_cpu, batch.seq_lens_sum))
        return prepare(self, batch, target_worker)

    monkeypatch.setattr(verify_input.DDTreeVerifyInput, "prepare_for_verify", note)
    made.forward_batch_generation(batch)
    assert seen == [(reserved, 183)]
    assert batch.seq_lens_cpu is None
    assert batch.seq_lens_sum is None


def test_requests_for_logprobs_get_one_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(PROMPTS, room=200)
    made = make_worker(world, [16], monkeypatch)
    info = SimpleNamespace(is_all_greedy=True)
    monkeypatch.setattr(worker, "apply_dflash_verify_logits_adjustments", lambda **given: None)
    batch = batch_of(
        world,
        made,
        info,
        return_logprob=True,
        top_logprobs_nums=[0, 0, 0],
        token_ids_logprobs=[None] * 3,
    )
    result = made.forward_batch_generation(batch)
    found = result.logits_output.next_token_logprobs
    assert found.shape == (3, BLOCK)
    best = torch.tensor([9.0] + [0.0] * (VOCABULARY - 1)).log_softmax(0)[0]
    for request, length in enumerate(result.accept_lens.tolist()):
        torch.testing.assert_close(found[request, :length], best.expand(length))


PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 2.0},
    "all": {"frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.3},
}


def penalised_next(sequence: list[int], output: list[int], asked: dict[str, Any]) -> int:
    """The world's choice by OpenAI's and SGLang's formulas, with the whole output known."""
    logits = [0.0] * VOCABULARY
    logits[rival_token(sequence)] = 8.0
    logits[next_token(sequence)] = 9.0
    for token in set(output):
        logits[token] -= asked.get("frequency_penalty", 0.0) * output.count(token)
        logits[token] -= asked.get("presence_penalty", 0.0)
        scale = asked.get("repetition_penalty", 1.0)
        logits[token] = logits[token] * scale if logits[token] < 0 else logits[token] / scale
    return max(range(VOCABULARY), key=lambda token: (logits[token], -token))


class Host:
    """What SGLang's scheduler knows of the answers: all of them, or not yet the step before."""

    def __init__(self, world: World, late: bool) -> None:
        self._world = world
        self._late = late
        self._known = [len(prompt) + (not late) for prompt in PROMPTS]

    def requests(self, asked: Sequence[dict[str, Any]]) -> list[Any]:
        """The requests as they are when the next step is launched."""
        lengths = [len(sequence) for sequence in self._world.sequences]
        known = self._known if self._late else lengths
        self._known = lengths
        return [
            request_of(len(sequence) - 1, prompt, sequence[len(prompt) : end], **wants)
            for sequence, prompt, end, wants in zip(
                self._world.sequences, PROMPTS, known, asked, strict=True
            )
        ]


@pytest.mark.parametrize(
    ("kind", "nodes", "late"),
    [
        *((kind, [16], True) for kind in PENALTIES),
        *(("all", nodes, late) for nodes in ([1], [1, 8, 70]) for late in (False, True)),
    ],
)
def test_penalties_are_those_of_the_path(
    kind: str, nodes: list[int], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "apply_dflash_verify_logits_adjustments", lambda **given: None)
    started = [[*prompt, next_token(prompt)] for prompt in PROMPTS]
    world = World(started, room=400, rival=8.0)
    made = make_worker(world, nodes, monkeypatch)
    host = Host(world, late)
    asked = [PENALTIES[kind], {}, PENALTIES[kind]]
    changed = longest = 0
    for _ in range(12):
        before = [len(sequence) for sequence in world.sequences]
        info = SimpleNamespace(is_all_greedy=True)
        step(world, made, sampling_info=info, reqs=host.requests(asked))
        for sequence, start, prompt, wants in zip(
            world.sequences, before, PROMPTS, asked, strict=True
        ):
            longest = max(longest, len(sequence) - start)
            for at in range(start, len(sequence)):
                expected = penalised_next(sequence[:at], sequence[len(prompt) : at], wants)
                assert sequence[at] == expected
                changed += expected != next_token(sequence[:at])
    assert changed > 0
    assert (longest > 1) == (nodes != [1])


@pytest.mark.parametrize("late", [False, True])
def test_a_least_number_of_tokens_holds_back_the_end(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop tokens come once so many tokens are out, and not within the step before."""
    monkeypatch.setattr(worker, "apply_dflash_verify_logits_adjustments", lambda **given: None)
    started = [[*prompt, next_token(prompt)] for prompt in PROMPTS]
    world = World(started, room=400)
    made = make_worker(world, [16], monkeypatch)
    host = Host(world, late)
    stops = list(range(VOCABULARY - 4))
    asked = [{"min_new_tokens": 13, "stop_token_ids": stops}, {}, {}]
    for _ in range(12):
        info = SimpleNamespace(is_all_greedy=True)
        step(world, made, sampling_info=info, reqs=host.requests(asked))
    output = world.sequences[0][len(PROMPTS[0]) :]
    rule = [
        next_token(world.sequences[0][:at]) for at in range(len(PROMPTS[0]), len(PROMPTS[0]) + 40)
    ]
    assert not set(output[1:13]) & set(stops)
    assert any(token in stops for token in rule[1:13])
    assert output[13:20] == rule[13:20]
    assert set(output[13:20]) & set(stops)
