"""What the chart tells SGLang, read by the parser of the SGLang that is pinned."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from longleaf.engine.launch import engine_command
from tests.charts.rendering import SHAPES, Tools, container, load_yaml

READER = Path(__file__).parent / "read_sglang_arguments.py"


SHAPES_READ = ("default", "full", "multi-node")
REFUSED = {
    "--context-len=5": "SGLang knows no --context-len",
    "--tool-call-parser=no-such-parser": "invalid choice: 'no-such-parser'",
    "--page-size=one": "invalid int value",
}


def _rendered(tools: Tools, shape: str, **values: Any) -> list[str]:
    arguments = container(tools.template(shape, values).engine, "engine")["args"]
    context = engine_command.make_context("engine", list(arguments[1:]))
    return list(context.params["sglang_args"])


@pytest.fixture(scope="module")
def read(tools: Tools) -> dict[str, Any]:
    """What each shape, and the default with one more word, is read as."""
    python = os.environ.get("LONGLEAF_ENGINE_PYTHON")
    if python is None:
        pytest.skip("needs SGLang: make test-chart installs it")
    lists = {shape: _rendered(tools, shape) for shape in SHAPES_READ}
    for word in REFUSED:
        lists[word] = _rendered(tools, "default", **{"engine.extraArgs": [word]})
    done = subprocess.run(
        [python, READER],
        input=json.dumps(list(lists.values())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lists, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_shapes_without_sglang_are_known() -> None:
    kinds = {shape: load_yaml(path) for shape, path in SHAPES.items()}
    without = {
        shape
        for shape, values in kinds.items()
        if (values.get("engine") or {}).get("kind") == "embedded"
    }
    assert set(SHAPES) - without == set(SHAPES_READ)


def test_sglang_reads_every_shape(read: dict[str, Any]) -> None:
    for shape in SHAPES_READ:
        found = read[shape]
        assert isinstance(found, dict), found
        assert found["model_path"] == "/models/target"
        assert found["served_model_name"] == "kimi-k2.6"
        assert (found["host"], found["port"]) == ("0.0.0.0", 30000)
        assert (found["tp_size"], found["context_length"]) == (8, 200_000)
        assert (found["max_total_tokens"], found["max_running_requests"]) == (218_000, 8)
        assert (found["mem_fraction_static"], found["chunked_prefill_size"]) == (0.9, 8192)
        assert (found["page_size"], found["attention_backend"]) == (1, "longleaf_mla")
        assert found["speculative_algorithm"] == "DDTREE"
        assert found["speculative_draft_model_path"] == "/models/drafter"
        assert found["speculative_draft_attention_backend"] == "triton"
        assert found["enable_metrics"] is True
        assert found["skip_server_warmup"] is True
        assert found["disable_prefill_cuda_graph"] is True
        assert found["trust_remote_code"] is True
    assert read["default"]["speculative_num_draft_tokens"] == 32
    assert read["default"]["kv_cache_dtype"] == "auto"
    assert read["default"]["api_key"] is None


def test_sglang_reads_what_full_adds(read: dict[str, Any]) -> None:
    found = read["full"]
    assert found["speculative_num_draft_tokens"] == 64
    assert found["speculative_draft_window_size"] == 2048
    assert found["kv_cache_dtype"] == "fp8_e4m3"
    assert found["api_key"] == "$(LONGLEAF_ENGINE_API_KEY)"
    assert (found["reasoning_parser"], found["tool_call_parser"]) == ("kimi_k2", "kimi_k2")


@pytest.mark.parametrize("word", REFUSED)
def test_what_sglang_does_not_know_fails(read: dict[str, Any], word: str) -> None:
    assert REFUSED[word] in read[word]
