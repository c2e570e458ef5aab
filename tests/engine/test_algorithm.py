"""DDTREE in SGLang's registry, its server arguments, and the refusal that a patch lifts."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from sglang.srt.arg_groups import speculative_hook
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import dflash_utils, spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req

from longleaf.engine import algorithm
from longleaf.engine.drift import DriftError
from longleaf.engine.options import EngineOptions
from longleaf.engine.patches import check_patches, p010_allow_logprobs


@pytest.fixture
def ddtree(monkeypatch: pytest.MonkeyPatch) -> algorithm.DDTreeAlgorithm:
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    return algorithm.register()


def test_sglang_finds_the_algorithm_and_asks_it_everything_it_asks_its_own(
    ddtree: algorithm.DDTreeAlgorithm,
) -> None:
    assert SpeculativeAlgorithm.from_string("ddtree") is ddtree
    assert algorithm.register() is ddtree
    public = [name for name in vars(SpeculativeAlgorithm) if not name.startswith("_")]
    asked = [
        name
        for name in public
        if name.islower() and name not in ("from_string", "register", "name", "value")
    ]
    assert [name for name in asked if not hasattr(ddtree, name)] == []
    stock: Any = SpeculativeAlgorithm.DFLASH
    for name in asked:
        if name.startswith(("is_", "supports_", "need", "has_", "carries")):
            assert getattr(ddtree, name)() == getattr(stock, name)(), name
    assert ddtree.supports_overlap


def test_another_algorithm_of_that_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_registry, "_REGISTRY", {"DDTREE": object()})
    with pytest.raises(TypeError, match="another algorithm"):
        algorithm.register()


def test_the_drafter_has_a_width_of_its_own(
    ddtree: algorithm.DDTreeAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(
        runtime_context, "get_spec", lambda: SimpleNamespace(speculative_dflash_block_size=8)
    )
    args = SimpleNamespace(speculative_num_draft_tokens=64)
    for is_draft, given, expected in ((True, None, 8), (False, None, 64), (False, 16, 16)):
        rows = resolve_num_tokens_per_req(
            phase="target_verify",
            server_args=args,
            spec_algorithm=ddtree,
            is_draft_worker=is_draft,
            num_draft_tokens=given,
        )
        assert rows == expected


def arguments(**given: Any) -> Any:
    values = {
        **{item.name: item.default for item in fields(ServerArgs)},
        "attention_backend": "longleaf_mla",
        "cuda_graph_config": default_cuda_graph_config(),
        "_cuda_graph_config_locked": set(),
        "speculative_algorithm": "DDTREE",
        "device": "cuda",
        "pp_size": 1,
        "page_size": 1,
        "speculative_draft_model_path": "drafter",
        "speculative_draft_attention_backend": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_dflash_block_size": 8,
        "speculative_draft_window_size": None,
        "max_running_requests": None,
        "enable_mixed_chunk": True,
        "enable_dp_attention": False,
    }
    return SimpleNamespace(**values | given)


@pytest.fixture
def handle(ddtree: algorithm.DDTreeAlgorithm, monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "resolved_view", lambda args: args)
    options = {"given": EngineOptions()}
    monkeypatch.setattr(algorithm, "engine_options", lambda: options["given"])

    def run(nodes: tuple[int, ...] = (), **given: Any) -> Any:
        options["given"] = EngineOptions(nodes=nodes)
        args = arguments(**given)
        ddtree.handle_server_args(args)
        return args

    return run


def test_server_arguments_are_filled_in(handle: Any) -> None:
    args = handle(speculative_num_draft_tokens=9)
    assert args.speculative_num_draft_tokens == 9
    assert args.speculative_dflash_block_size == 8
    assert args.speculative_draft_attention_backend == "triton"
    assert args.speculative_num_steps == args.speculative_eagle_topk == 1
    assert args.enable_mixed_chunk is False
    assert args.cuda_graph_config.prefill.backend == "disabled"
    assert args.cuda_graph_config.decode.backend == "full"
    assert handle().speculative_num_draft_tokens == 64
    assert handle((1,)).speculative_num_draft_tokens == 8
    assert handle((1, 32)).speculative_num_draft_tokens == 32


def test_the_drafters_block_is_read_where_none_is_given(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithm, "drafter_block", lambda args: 16)
    args = handle(speculative_dflash_block_size=None)
    assert args.speculative_dflash_block_size == 16


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"speculative_draft_model_path": None}, "draft-model-path"),
        ({"speculative_draft_attention_backend": "longleaf_mla"}, "the target alone"),
        ({"speculative_dflash_block_size": 17}, "2 to 16"),
        ({"speculative_num_draft_tokens": 4}, "below the drafter's block"),
        ({"speculative_num_draft_tokens": 200}, "at most 128"),
        ({"page_size": 64}, "page-size 1"),
        ({"pp_size": 2}, "--pp-size is 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention is True"),
        ({"prefill_attention_backend": "triton"}, "--prefill-attention-backend is triton"),
        ({"speculative_draft_window_size": 8, "speculative_num_draft_tokens": 9}, "window"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(
    handle: Any, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises((DriftError, ValueError), match=reason):
        handle(**given)


def test_the_patch_lets_ddtree_alone_answer_with_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    check_patches([p010_allow_logprobs.PATCH])
    stock = dflash_utils.validate_dflash_request
    monkeypatch.setattr(dflash_utils, "validate_dflash_request", stock)
    p010_allow_logprobs.PATCH.apply()
    patched = dflash_utils.validate_dflash_request
    p010_allow_logprobs.PATCH.apply()
    assert dflash_utils.validate_dflash_request is patched
    spec = SimpleNamespace(speculative_algorithm="DDTREE")
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    wants = SimpleNamespace(return_logprob=True, return_hidden_states=False)
    assert patched(wants, True) is None
    wants.return_hidden_states = True
    assert "hidden_states" in patched(wants, True)
    assert "hidden_states" in patched(wants, False)
    spec.speculative_algorithm = "DFLASH"
    assert "return_logprob" in patched(wants, True)


def test_sglangs_hook_is_the_one_that_is_called() -> None:
    assert callable(speculative_hook._handle_dflash)
