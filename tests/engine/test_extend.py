import warnings
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

from longleaf.engine import extend  # noqa: E402
from longleaf_kernels.reference import verify_mla_reference  # noqa: E402
from tests.engine.varlen import plain_varlen  # noqa: E402

LATENT, ROPE = 512, 64


def test_short_extends_over_a_prefix_are_absorbed_and_long_ones_are_not() -> None:
    limit = extend.ABSORBED_EXTEND_TOKENS
    assert extend.use_mha([0, 0], [1, 5], prefix_allowed=False)
    assert not extend.use_mha([0, 9], [limit + 1, limit + 1], prefix_allowed=False)
    assert not extend.use_mha([0, 9], [1, limit], prefix_allowed=True)
    assert extend.use_mha([0, 9], [1, limit + 1], prefix_allowed=True)


def test_the_limit_can_be_set_to_measure_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(text: str) -> int:
        extend.absorbed_extend_tokens.cache_clear()
        monkeypatch.setenv(extend.ABSORBED_VARIABLE, text)
        return extend.absorbed_extend_tokens()

    try:
        assert limit("0") == 0
        assert extend.use_mha([0, 9], [1, 1], prefix_allowed=True)
        with pytest.raises(ValueError, match="must be a number of tokens, got '-1'"):
            limit("-1")
    finally:
        extend.absorbed_extend_tokens.cache_clear()


@pytest.mark.parametrize(
    ("mode", "prefix", "new", "method"),
    [
        ("EXTEND", 0, 1, "MHA_CHUNKED_KV"),
        ("EXTEND", 30_000, 1, "MLA"),
        ("EXTEND", 30_000, 8_192, "MHA_CHUNKED_KV"),
        ("MIXED", 30_000, 8_192, "MHA_CHUNKED_KV"),
        ("TARGET_VERIFY", 30_000, 8_192, "MLA"),
        ("DECODE", 30_000, 1, "MLA"),
        ("IDLE", 0, 0, "MLA"),
    ],
)
def test_sglang_is_told_the_form(mode: str, prefix: int, new: int, method: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(
        forward_mode=ForwardMode[mode], extend_prefix_lens_cpu=[prefix], extend_seq_lens_cpu=[new]
    )
    attn = SimpleNamespace(disable_chunked_prefix_cache=False)
    assert extend.attention_method(attn, batch).name == method


def merged(parts: list[tuple[Any, Any]]) -> Any:
    outs, sums = zip(*parts, strict=True)
    weights = torch.stack(sums).softmax(0)
    return (weights[..., None] * torch.stack(outs)).sum(0)


def test_prefix_chunks_and_new_tokens_merge_to_the_absorbed_result() -> None:
    """Widths of the tiny model, three requests, the middle one without a prefix, padded rows."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    heads, nope, width_v, chunk = 2, 32, 32, 4
    prefixes, lengths = [9, 0, 3], [5, 4, 1]
    w_k, w_v = normal(heads, nope, LATENT) / 20, normal(heads, LATENT, width_v) / 20
    pool = normal(40, LATENT + ROPE)
    slots = torch.randperm(40, generator=generator)[: sum(prefixes)]
    new = normal(sum(lengths), LATENT + ROPE)
    q = normal(sum(lengths), heads, nope + ROPE)
    scale = (nope + ROPE) ** -0.5

    def up(rows: Any) -> tuple[Any, Any]:
        latent, rope = rows.split([LATENT, ROPE], dim=-1)
        k = torch.einsum("hnl,tl->thn", w_k, latent)
        k = torch.cat([k, rope[:, None].expand(-1, heads, -1)], dim=-1)
        return k, torch.einsum("hlv,tl->thv", w_v, latent)

    padding = 3
    padded_q = torch.cat([q, normal(padding, *q.shape[1:])])
    attention = extend.UpProjected(torch.tensor(lengths), lengths, plain_varlen)
    state = SimpleNamespace(attn_attend_prefix_cache=False, mha_return_lse=True)
    k, v = up(torch.cat([new, normal(padding, LATENT + ROPE)]))
    parts = [attention.attend(padded_q, k, v, state, scale)]
    state.attn_attend_prefix_cache = True
    starts = [0, 9, 9]
    state.prefix_chunk_cu_seq_lens, state.prefix_chunk_max_seq_lens = [], []
    for index, first in enumerate(range(0, max(prefixes), chunk)):
        sizes = [max(0, min(chunk, length - first)) for length in prefixes]
        inside = [slots[s + first : s + first + n] for s, n in zip(starts, sizes, strict=True)]
        state.prefix_chunk_idx = index
        state.prefix_chunk_cu_seq_lens.append(
            torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
        )
        state.prefix_chunk_max_seq_lens.append(max(sizes))
        k, v = up(pool[torch.cat(inside)])
        parts.append(attention.attend(padded_q, k, v, state, scale))
    result = merged(parts)[: sum(lengths)]

    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q[..., :nope], w_k), q[..., nope:]], dim=-1)
    latent_out, _ = verify_mla_reference(
        absorbed,
        pool,
        torch.tensor([0, 9, 9, 12], dtype=torch.int32),
        slots,
        new,
        None,
        scale=scale,
        q_indptr=torch.tensor([0, 5, 9, 10], dtype=torch.int32),
    )
    expected = torch.einsum("thl,hlv->thv", latent_out, w_v)
    assert torch.allclose(result, expected, rtol=1e-10, atol=1e-12)

    state.attn_attend_prefix_cache, state.mha_return_lse = False, False
    k, v = up(new)
    alone: Any = attention.attend(padded_q, k, v, state, scale)
    assert alone.shape == (sum(lengths) + padding, heads, width_v)
    assert torch.allclose(alone[: sum(lengths)], parts[0][0][: sum(lengths)])
    assert not alone[sum(lengths) :].any()


def test_the_log_sum_exp_is_turned_to_rows_and_no_keys_weigh_nothing() -> None:
    q = torch.zeros(3, 2, 8)
    lse = torch.tensor([[1.0, float("inf"), 3.0], [4.0, 5.0, float("inf")]])
    rows = extend.by_row(lse, q)
    assert rows.tolist() == [[1.0, 4.0], [float("-inf"), 5.0], [3.0, float("-inf")]]
    assert rows.is_contiguous()
    with pytest.raises(RuntimeError, match=r"shape \[1, 2, 3\], expected \[2, 3\]"):
        extend.by_row(lse[None], q)


def test_the_prefill_kernel_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(extend.KERNEL_VARIABLE, raising=False)
    assert extend.chosen_varlen() is extend.torch_varlen
    monkeypatch.setenv(extend.KERNEL_VARIABLE, "fa3")
    assert extend.chosen_varlen() is extend.fa3_varlen
    monkeypatch.setenv(extend.KERNEL_VARIABLE, "fa9")
    with pytest.raises(ValueError, match="one of torch, fa3, got 'fa9'"):
        extend.chosen_varlen()


def test_torchs_flash_attention_takes_the_arguments_it_is_given() -> None:
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    names = [argument.name for argument in arguments if not argument.kwarg_only]
    assert names == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert "scale" in [argument.name for argument in arguments if argument.kwarg_only]
