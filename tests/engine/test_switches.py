"""The table of switches that are refused, each through the pinned SGLang's own parser."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from longleaf.engine import backend, check, switches
from longleaf.engine.drift import DriftError
from longleaf.engine.worker import DDTreeWorker

PLAIN = ("--model-path", "any", "--attention-backend", "longleaf_mla")
TREES = (*PLAIN, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "any")
OURS = "--prefill-attention-backend longleaf_mla --decode-attention-backend longleaf_mla"
REFUSED = {
    "--prefill-attention-backend triton": "would give it the verifies",
    "--speculative-attention-mode decode --decode-attention-backend triton": "reads no tree",
    "--attention-backend triton --prefill-attention-backend longleaf_mla": "it is longleaf_mla too",
    "--speculative-algorithm EAGLE": "verifies DDTREE, DFLASH, NGRAM",
    "--speculative-draft-attention-backend longleaf_mla": "the target alone",
    "--dtype float16": "in bfloat16",
    "--enable-two-batch-overlap": "one batch",
    "--enable-pdmux": "one stream",
    "--dcp-size 2": "whole prefixes",
    "--attn-cp-size 2": "whole prompts",
    "--enable-unified-memory": "not virtual ones",
    "--pp-size 2": "pipeline stages",
    "--enable-dp-attention": "different node counts",
    "--enable-lora": "beside NGRAM alone",
    "--lora-paths a=b": "beside NGRAM alone",
    "--enable-multi-layer-eagle": "list of drafters",
    "--disaggregation-mode decode": "no state to draft from",
    "--enable-lmcache": "stale ones",
    "--enable-flexkv": "stale ones",
    "--enable-return-routed-experts": "move to other slots",
    "--enable-return-indexer-topk": "move to other slots",
    "--speculative-accept-threshold-single 0.9": "the target's distribution",
    "--speculative-accept-threshold-acc 0.9": "the target's distribution",
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    backend.register()


@pytest.mark.parametrize("words", REFUSED)
def test_a_switch_that_ours_breaks_is_refused(words: str) -> None:
    with pytest.raises(DriftError, match=REFUSED[words]) as caught:
        switches.refuse(check.parse([*TREES, *words.split()]))
    assert "; fix: " in str(caught.value)
    assert any(str(caught.value).startswith(word) for word in ("--enable-lora", *words.split()))


def test_every_row_of_the_table_has_a_case() -> None:
    rows = {row.argument for row in (*switches.BESIDE_BACKEND, *switches.BESIDE_TREES)}
    assert rows <= {word for words in REFUSED for word in words.split()}


@pytest.mark.parametrize("words", ["", OURS, "--enable-hierarchical-cache", "--dtype bfloat16"])
def test_what_works_beside_trees_is_let_through(words: str) -> None:
    switches.refuse(check.parse([*TREES, *words.split()]))


def test_without_trees_only_what_the_backend_cannot_serve_is_refused() -> None:
    for words in ("--pp-size 2", "--enable-lora", "--speculative-algorithm NGRAM"):
        switches.refuse(check.parse([*PLAIN, *words.split()]))
    with pytest.raises(DriftError, match="--decode-attention-backend is triton"):
        switches.refuse(check.parse([*PLAIN, "--decode-attention-backend", "triton"]))
    elsewhere = ["--model-path", "any", "--attention-backend", "triton"]
    switches.refuse(check.parse([*elsewhere, "--prefill-attention-backend", "fa3"]))
    with pytest.raises(DriftError, match="DDTREE runs on the attention backend longleaf_mla"):
        switches.refuse(check.parse([*elsewhere, "--speculative-algorithm", "ddtree"]))


def _runner(mode: str) -> Any:
    return SimpleNamespace(
        kv_cache_dtype=None,
        token_to_kv_pool=None,
        req_to_token_pool=None,
        server_args=SimpleNamespace(speculative_attention_mode=mode),
        model_config=SimpleNamespace(context_len=1),
    )


@pytest.mark.parametrize(("mode", "taken"), [("prefill", "other"), ("decode", "ours")])
def test_the_worker_takes_no_mixture_of_backends(mode: str, taken: str) -> None:
    """A switch says which of its two backends SGLang's mixture gives trees to."""
    ours, other = (
        SimpleNamespace(name=name, needs_cpu_seq_lens=False) for name in ("ours", "other")
    )
    runner = _runner(mode)
    mixed: Any = HybridAttnBackend(runner, other, ours)
    assert mixed._select_backend(ForwardMode.TARGET_VERIFY).name == taken
    worker: Any = object.__new__(DDTreeWorker)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=mixed))
    worker.model_runner = worker._target_worker.model_runner
    with pytest.raises(ValueError, match="longleaf_mla alone, the target has HybridAttnBackend"):
        worker.init_cuda_graphs()
