import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import stubs

torch = pytest.importorskip("torch")
stubs.install()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's own, about the GPU that is missing
    pytest.importorskip("sglang.srt.server_args")
    pytest.importorskip("sglang.srt.models.deepseek_common.attention_backend_handler")
    pytest.importorskip("sglang.srt.speculative.dflash_utils")

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.speculative.spec_info import SpecInputType  # noqa: E402

from longleaf.engine import backend as module  # noqa: E402
from longleaf.engine import extend  # noqa: E402
from longleaf.engine.metadata import fixed_bits, pack_bits, words  # noqa: E402
from longleaf_kernels.reference import verify_mla_reference  # noqa: E402

HEADS, SLOTS, CONTEXT = 2, 400, 128
LAYER = SimpleNamespace(
    layer_id=0, tp_q_head_num=HEADS, qk_head_dim=576, v_head_dim=512, scaling=0.07
)


class Pool:
    """SGLang's latent cache, of one layer, on the CPU."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(SLOTS, 1, 576, generator=generator).bfloat16()

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.rows

    def set_mla_kv_buffer(self, layer: Any, loc: Any, nope: Any, rope: Any) -> None:
        assert loc.shape[0] == nope.shape[0] == rope.shape[0]
        self.rows[loc] = torch.cat([nope, rope], dim=-1)


def runner(**changes: Any) -> Any:
    generator = torch.Generator().manual_seed(6)
    # Slot 0 takes what padding writes.
    table = 1 + torch.randperm(SLOTS - 1, generator=generator)[: 3 * CONTEXT].view(3, CONTEXT)
    table = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.long), table]).int()
    facts: dict[str, Any] = {
        "is_draft_worker": False,
        "use_mla_backend": True,
        "page_size": 1,
        "device": "cpu",
        "server_args": SimpleNamespace(enable_two_batch_overlap=False, enable_pdmux=False),
        "model_config": SimpleNamespace(
            kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16, num_attention_heads=HEADS
        ),
        "token_to_kv_pool": Pool(),
        "token_to_kv_pool_allocator": object(),
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        **changes,
    }
    return SimpleNamespace(**facts)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank; the kernel's place is taken by the reference with the same arguments."""
    import sglang.srt.runtime_context as context

    parallel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_cp_size=1)
    monkeypatch.setattr(context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(
        module, "verify_workspace", lambda device: torch.zeros(11 << 20, dtype=torch.uint8)
    )

    def reference(*arguments: Any, workspace: Any, max_nodes: int, **named: Any) -> Any:
        out, lse = verify_mla_reference(*arguments, **named)
        return out.bfloat16(), lse

    monkeypatch.setattr(module, "verify_mla", reference)


def test_every_method_has_the_interfaces_signature() -> None:
    for name, method in vars(module.LongleafMlaBackend).items():
        expected = getattr(AttentionBackend, name, None)
        if name.startswith("_") or not callable(expected):
            continue
        ours = list(inspect.signature(method).parameters)
        assert ours == list(inspect.signature(expected).parameters), name
    assert not module.LongleafMlaBackend.needs_cpu_seq_lens
    # DFLASH captures without a mask what is on this list; bits are read whatever it says.
    from sglang.srt.speculative import dflash_utils

    skipped = dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS
    assert "TritonAttnBackend" in skipped
    assert module.LongleafMlaBackend.__name__ not in skipped


def test_sglang_finds_the_backend_by_its_name() -> None:
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    module.register()
    assert module.register() is module.LongleafMlaBackend
    assert server_args.ATTENTION_BACKEND_CHOICES.count("longleaf_mla") == 1
    chunked = server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    assert chunked.count("longleaf_mla") == 1
    target = runner()
    target.attn_backend = ATTENTION_BACKENDS["longleaf_mla"](target)
    assert type(target.attn_backend) is module.LongleafMlaBackend
    from sglang.srt.model_executor import forward_context

    context = forward_context.ForwardContext(attn_backend=target.attn_backend)
    with forward_context.forward_context(context):
        assert forward_context.get_token_to_kv_pool() is target.token_to_kv_pool
        assert forward_context.get_req_to_token_pool() is target.req_to_token_pool
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    handler = AttentionBackendRegistry.get_handler("longleaf_mla")
    assert handler is extend.attention_method
    target.attn_backend.init_cuda_graph_state(2, 16)
    held = target.attn_backend.buffer_bytes()
    second = ATTENTION_BACKENDS["longleaf_mla"](target)
    second.init_cuda_graph_state(2, 2)
    assert second.buffer_bytes() == target.attn_backend.buffer_bytes() == held


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_draft_worker": True}, "--speculative-draft-attention-backend triton"),
        ({"use_mla_backend": False}, "MLA models only"),
        ({"page_size": 64}, "--page-size 1"),
        (
            {"token_to_kv_pool": SimpleNamespace(dtype=torch.float8_e5m2)},
            "bfloat16 or float8_e4m3fn cache",
        ),
        (
            {"server_args": SimpleNamespace(enable_two_batch_overlap=True, enable_pdmux=False)},
            "two-batch-overlap",
        ),
        (
            {"token_to_kv_pool_allocator": SimpleNamespace(translate_kv_loc=None)},
            "unified memory pool",
        ),
        (
            {
                "model_config": SimpleNamespace(
                    kv_lora_rank=256,
                    qk_rope_head_dim=64,
                    dtype=torch.bfloat16,
                    num_attention_heads=8,
                )
            },
            "kv_lora_rank 512",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.LongleafMlaBackend(runner(**changes))


def test_prefill_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.model_executor.cuda_graph_config as config

    monkeypatch.setattr(
        config, "check_cuda_graph_backend", lambda phase, kind: (phase, kind) == ("prefill", "full")
    )
    with pytest.raises(ValueError, match="--disable-prefill-cuda-graph"):
        module.LongleafMlaBackend(runner())


def random_rows(count: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(count, HEADS * 576, generator=generator).bfloat16()
    return q, torch.randn(count, 1, 576, generator=generator).bfloat16()


def random_trees(requests: int, nodes: int, seed: int) -> Any:
    """Visibility of random trees: int64 [requests, nodes, words]."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.zeros(requests, nodes, nodes, dtype=torch.bool)
    for tree in allowed:
        tree[0, 0] = True
        for node in range(1, nodes):
            parent = int(torch.randint(0, node, (1,), generator=generator))
            tree[node] = tree[parent]
            tree[node, node] = True
    return pack_bits(allowed)


def expected(target: Any, q: Any, k: Any, requests: list[int], prefix: list[int], bits: Any) -> Any:
    """The same attention from the reference and the request table alone."""
    table = target.req_to_token_pool.req_to_token
    rows = [table[r, :n] for r, n in zip(requests, prefix, strict=True)]
    pointers = torch.tensor([0, *torch.tensor(prefix).cumsum(0)], dtype=torch.int32)
    out, _ = verify_mla_reference(
        q.view(-1, HEADS, 576),
        target.token_to_kv_pool.rows.clone(),
        pointers,
        torch.cat(rows),
        k.view(-1, 576),
        bits,
        scale=LAYER.scaling,
    )
    return out.bfloat16().flatten(1)


def verify_batch(
    mode: ForwardMode, requests: list[int], lens: list[int], nodes: int, **more: Any
) -> Any:
    facts: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": len(requests),
        "req_pool_indices": torch.tensor(requests),
        "seq_lens": torch.tensor(lens),
        "input_ids": torch.zeros(len(requests) * nodes, dtype=torch.long),
        "out_cache_loc": torch.zeros(len(requests) * nodes, dtype=torch.long),
        "spec_info": SimpleNamespace(
            draft_token_num=nodes, spec_input_type=SpecInputType.DFLASH_VERIFY
        ),
        **more,
    }
    return SimpleNamespace(**facts)


def test_a_graph_captured_as_a_chain_replays_trees_and_never_stale_bits() -> None:
    """Capture as SGLang does, with no visibility; replay three requests' trees padded to four."""
    target, nodes = runner(), 9
    backend = module.LongleafMlaBackend(target)
    backend.init_cuda_graph_state(4, 4 * nodes)
    captured = verify_batch(ForwardMode.TARGET_VERIFY, [0] * 4, [1] * 4, nodes)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    graph_reads = backend._step

    bits = random_trees(3, nodes, seed=1)
    lens = [100, 0, 37, 1]
    view = verify_batch(
        ForwardMode.TARGET_VERIFY,
        [2, 1, 3, 0],
        lens,
        nodes,
        num_padding=1,
        spec_info=SimpleNamespace(draft_token_num=nodes, visible=bits),
    )
    backend.init_forward_metadata_out_graph(view)
    assert backend._step is graph_reads
    q, k = random_rows(4 * nodes, seed=2)
    out = backend.forward_extend(q, k, k[..., :512], LAYER, view)
    own = fixed_bits(nodes, "cpu").own
    wanted = torch.cat([bits.flatten(0, 1), own])
    assert torch.equal(out, expected(target, q, k, [2, 1, 3, 0], [100, 0, 37, 0], wanted))
    causal = expected(target, q, k, [2, 1, 3, 0], [100, 0, 37, 0], None)
    assert not torch.equal(out[:nodes], causal[:nodes])

    # A chain in the same graph, one request: no bit of the trees is left.
    chain = verify_batch(ForwardMode.TARGET_VERIFY, [3, 0, 0, 0], [12, 1, 1, 1], nodes)
    chain.num_padding = 3
    backend.init_forward_metadata_out_graph(chain)
    out = backend.forward_extend(q, k, k[..., :512], LAYER, chain)
    wanted = torch.cat([fixed_bits(nodes, "cpu").causal, own, own, own])
    assert torch.equal(out, expected(target, q, k, [3, 0, 0, 0], [12, 0, 0, 0], wanted))


def test_a_tree_without_its_visibility_is_refused() -> None:
    backend = module.LongleafMlaBackend(runner())
    batch = verify_batch(ForwardMode.TARGET_VERIFY, [1], [5], 4)
    batch.spec_info = SimpleNamespace(draft_token_num=4, visible=None)
    with pytest.raises(ValueError, match="without its visibility"):
        backend.init_forward_metadata(batch)
    batch.spec_info = SimpleNamespace(draft_token_num=4, visible=random_trees(1, 5, 1))
    with pytest.raises(ValueError, match=r"must be \[requests, 4, 1\]"):
        backend.init_forward_metadata(batch)
    batch.spec_info = SimpleNamespace(draft_token_num=4, spec_input_type=SpecInputType.EAGLE_VERIFY)
    with pytest.raises(NotImplementedError, match="EAGLE_VERIFY"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("nodes", [1, 2, 65])
def test_an_eager_verify_reads_its_trees(nodes: int) -> None:
    target = runner()
    backend = module.LongleafMlaBackend(target)
    bits = random_trees(2, nodes, seed=nodes)
    assert bits.shape == (2, nodes, words(nodes))
    batch = verify_batch(ForwardMode.TARGET_VERIFY, [3, 1], [60, 2], nodes)
    batch.spec_info = SimpleNamespace(draft_token_num=nodes, visible=bits)
    backend.init_forward_metadata(batch)
    q, k = random_rows(2 * nodes, seed=3)
    out = backend.forward_extend(q, k, k[..., :512], LAYER, batch)
    wanted = bits.flatten(0, 1) if nodes > 1 else None
    assert torch.equal(out, expected(target, q, k, [3, 1], [60, 2], wanted))


@pytest.mark.parametrize("graph", [False, True])
def test_decode_sees_the_prefix_and_its_own_token_once(graph: bool) -> None:
    target = runner()
    backend = module.LongleafMlaBackend(target)
    batch = verify_batch(ForwardMode.DECODE, [2, 3], [51, 1], 1, spec_info=None)
    table = target.req_to_token_pool.req_to_token
    batch.out_cache_loc = table[[2, 3], [50, 0]].long()
    if graph:
        backend.init_cuda_graph_state(2, 2)
        backend.init_forward_metadata_out_graph(
            verify_batch(ForwardMode.DECODE, [0, 0], [1, 1], 1, spec_info=None), in_capture=True
        )
        backend.init_forward_metadata_out_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    q, k = random_rows(2, seed=4)
    out = backend.forward_decode(q, k, k[..., :512], LAYER, batch)
    assert torch.equal(target.token_to_kv_pool.rows[batch.out_cache_loc], k)
    assert torch.equal(out, expected(target, q, k, [2, 3], [50, 0], None))


def test_an_absorbed_extend_is_causal_also_when_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend, "MAX_NODES", 4)
    target = runner()
    backend = module.LongleafMlaBackend(target)
    prefixes, lengths, requests = [20, 0], [10, 3], [3, 1]
    table = target.req_to_token_pool.req_to_token
    slots = torch.cat([table[3, 20:30], table[1, :3]]).long()
    padding = 2
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor(requests),
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths),
        out_cache_loc=torch.cat([slots, torch.zeros(padding, dtype=torch.long)]),
    )
    backend.init_forward_metadata(batch)
    q, k = random_rows(sum(lengths) + padding, seed=7)
    out: Any = backend.forward_extend(q, k, k[..., :512], LAYER, batch)
    assert out.shape[0] == sum(lengths) + padding
    assert not out[sum(lengths) :].any()
    whole, _ = verify_mla_reference(
        q[: sum(lengths)].view(-1, HEADS, 576),
        target.token_to_kv_pool.rows.clone(),
        torch.tensor([0, 20, 20], dtype=torch.int32),
        table[3, :20],
        k[: sum(lengths)].view(-1, 576),
        None,
        scale=LAYER.scaling,
        q_indptr=torch.tensor([0, 10, 13], dtype=torch.int32),
    )
    assert torch.equal(out[: sum(lengths)], whole.bfloat16().flatten(1))


def test_an_idle_rank_replays_padding_alone() -> None:
    target, nodes = runner(), 4
    backend = module.LongleafMlaBackend(target)
    backend.init_cuda_graph_state(2, 2 * nodes)
    make: Callable[..., Any] = verify_batch
    backend.init_forward_metadata_out_graph(
        make(ForwardMode.TARGET_VERIFY, [0, 0], [1, 1], nodes), in_capture=True
    )
    idle = make(ForwardMode.TARGET_VERIFY, [0, 0], [1, 1], nodes, num_padding=2, spec_info=None)
    backend.init_forward_metadata_out_graph(idle)
    step = backend._step
    assert step is not None
    assert step.kv_indptr.tolist() == [0, 0, 0]
    assert torch.equal(step.visible, fixed_bits(nodes, "cpu").own.repeat(2, 1))


def test_ngram_trees_come_from_sglangs_full_mask() -> None:
    target, nodes = runner(), 3
    backend = module.LongleafMlaBackend(target)
    bits = random_trees(2, nodes, seed=8)
    allowed = (bits >> torch.arange(nodes)) & 1 == 1
    lens = [4, 6]
    mask = torch.cat(
        [
            torch.cat([torch.ones(nodes, length, dtype=torch.bool), tree], dim=1).flatten()
            for length, tree in zip(lens, allowed, strict=True)
        ]
    )
    batch = verify_batch(ForwardMode.TARGET_VERIFY, [1, 2], lens, nodes)
    batch.spec_info = SimpleNamespace(
        draft_token_num=nodes, spec_input_type=SpecInputType.NGRAM_VERIFY, custom_mask=mask
    )
    backend.init_forward_metadata(batch)
    assert backend._step is not None
    assert torch.equal(backend._step.visible, bits.flatten(0, 1))
