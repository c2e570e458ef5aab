"""What the server tells about itself, and that metrics agree with usage."""

import re
from itertools import pairwise

import pytest

from longleaf.embedded.config import DrafterConfig
from longleaf.metrics import CONTEXT_BUCKETS, STEP_PHASES

from .conftest import MODELS, ServerProcess, StartServer

CORE = [
    "timestamp",
    "dp_rank",
    "num_running_reqs",
    "num_waiting_reqs",
    "num_waiting_uncached_tokens",
    "num_used_tokens",
    "num_total_tokens",
    "num_active_tokens",
    "max_total_num_tokens",
    "max_running_requests",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "utilization",
    "total_prefill_uncached_tokens",
    "total_prefill_busy_us",
    "decode_moments",
]


def samples(server: ServerProcess) -> dict[str, float]:
    """Sums over labels by sample name, and every sample with its labels."""
    reply = server.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: dict[str, float] = {}
    for line in reply.body.decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
            bare = name.partition("{")[0]
            if bare != name:
                found[bare] = found.get(bare, 0.0) + float(value)
    return found


def test_models(server: ServerProcess) -> None:
    body = server.get("/v1/models").json
    assert list(body) == ["object", "data"]
    card = body["data"][0]
    assert list(card) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 8192)
    assert server.get("/v1/models/tiny").json == card


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(server: ServerProcess, path: str) -> None:
    info = server.get(path).json
    expected = {
        "served_model_name": "tiny",
        "context_length": 8192,
        "max_total_num_tokens": 4096,
        "max_req_input_len": 4090,
        "max_running_requests": 4,
        "max_queued_requests": 2,
        "page_size": 1,
        "port": server.port,
        "speculative_algorithm": "DDTREE",
        "speculative_num_draft_tokens": 17,
        "speculative_num_steps": 7,
        "speculative_dflash_block_size": 8,
        "status": "ready",
    }
    assert {name: info[name] for name in expected} == expected


def test_model_info(server: ServerProcess) -> None:
    info = server.get("/model_info").json
    assert info["model_type"] == "deepseek_v3"
    assert info["architectures"] == ["DeepseekV3ForCausalLM"]
    assert info["is_generation"] is True
    assert server.get("/get_model_info").json == info


def test_health(server: ServerProcess) -> None:
    for path in ("/health", "/health_generate"):
        reply = server.get(path)
        assert (reply.status, reply.body) == (200, b"")


def test_loads(server: ServerProcess) -> None:
    server.chat(max_tokens=40)
    body = server.get("/v1/loads").json
    assert list(body) == ["timestamp", "version", "accelerator", "num_accelerators", "loads"]
    load = body["loads"][0]
    assert list(load) == [*CORE, "memory", "speculative", "disaggregation", "queues"]
    memory = ["weight_gb", "kv_cache_gb", "graph_gb", "token_capacity"]
    assert list(load["memory"]) == memory
    assert load["memory"]["kv_cache_gb"] > 0.01
    assert load["disaggregation"]["mode"] == "null"
    assert list(load["queues"]) == ["waiting", "grammar", "paused", "retracted", "prealloc_ready"]
    assert list(server.get("/v1/loads?include=core").json["loads"][0]) == CORE
    assert list(server.get("/v1/loads?include=core,spec").json["loads"][0]) == [
        *CORE,
        "speculative",
    ]
    reply = server.get("/v1/loads?include=core,nonsense")
    assert (reply.status, "nonsense" in reply.json["message"]) == (400, True)
    text = server.get("/v1/loads?format=prometheus").body.decode()
    assert 'sglang_max_total_num_tokens{dp_rank="0"} 4096' in text
    assert 'sglang_queues_waiting{dp_rank="0"} 0' in text
    assert re.search(r'sglang_spec_accept_length\{dp_rank="0"\} [1-8]\.', text)


def test_a_busy_server_tells_so(server: ServerProcess) -> None:
    connection, answer = server.open_stream("Count to 5000", max_tokens=3000)
    answer.readline()
    server.until(lambda: server.load()["num_running_reqs"] == 1)
    load = server.load()
    assert 0 < load["num_used_tokens"] == load["num_total_tokens"]
    assert load["token_usage"] == round(load["num_used_tokens"] / 4096, 4)
    found = samples(server)
    assert found["sglang:num_running_reqs"] == 1
    assert found["sglang:kv_used_tokens"] > 0
    assert found['longleaf_kv_pool_tokens{state="used"}'] > 0
    connection.close()
    server.until(lambda: server.load()["num_running_reqs"] == 0)
    server.until(lambda: samples(server)['longleaf_kv_pool_tokens{state="used"}'] == 0)
    assert samples(server)["longleaf_kv_pool_tokens"] == 4096


def test_metrics_agree_with_usage(start_server: StartServer) -> None:
    server = start_server()
    answers = [
        server.chat(f"Count from {n} to 90.", max_tokens=30 + n, return_spec_tokens_details=True)
        for n in range(6)
    ]
    answers.append(server.chat("plain", speculative=False, return_spec_tokens_details=True))
    usages = [answer.json["usage"] for answer in answers]
    details = [usage["spec_tokens_details"] for usage in usages]
    tokens = sum(usage["completion_tokens"] for usage in usages)
    steps = sum(detail["steps"] for detail in details)
    drafts = sum(detail["spec_num_correct_drafts"] for detail in details)
    proposed = sum(detail["spec_num_proposed_drafts"] for detail in details)
    found = samples(server)
    # The first token of an answer comes from prefill, every other one from a step.
    assert found["longleaf_commit_len_sum"] == tokens - len(answers)
    assert found["longleaf_commit_len_count"] == found["longleaf_accepted_depth_count"] == steps
    assert found["longleaf_accepted_depth_sum"] == drafts
    assert found["longleaf_commit_len_sum"] - steps == drafts
    assert found["longleaf_tree_nodes_sum"] == proposed + steps
    speculated = steps - details[-1]["steps"]
    assert found["sglang:spec_verify_calls_total"] == speculated
    load = server.load()
    assert load["decode_moments"][0] == steps
    assert load["decode_moments"][5] == tokens - len(answers)
    accept_length = (tokens - len(answers) - details[-1]["steps"]) / speculated
    assert load["speculative"]["accept_length"] == round(accept_length, 4)
    assert found["sglang:spec_accept_length"] == pytest.approx(accept_length)
    assert found["longleaf_kv_read_bytes_total"] > 0
    assert found['longleaf_drafter_span_tokens_count{context_bucket="1k"}'] <= speculated
    for phase in STEP_PHASES:
        key = f'longleaf_step_seconds_count{{context_bucket="1k",phase="{phase}"}}'
        assert found[key] == steps
    parts = sum(
        found[f'longleaf_step_seconds_sum{{context_bucket="1k",phase="{phase}"}}']
        for phase in STEP_PHASES[:-1]
    )
    total = found['longleaf_step_seconds_sum{context_bucket="1k",phase="total"}']
    assert parts == pytest.approx(total)
    assert set(re.findall(r'context_bucket="(\w+)"', " ".join(found))) <= set(CONTEXT_BUCKETS)


def test_the_drafter_window_holds(start_server: StartServer) -> None:
    """Past the window, a draft reads exactly the rows that its first query sees: window - 1."""
    server = start_server()
    server.post(
        "/v1/completions",
        {"prompt": [7, 8, 9] * 500, "max_tokens": 20, "temperature": 0, "ignore_eos": True},
    )
    found = samples(server)
    drafts = found['longleaf_drafter_span_tokens_count{context_bucket="4k"}']
    window = DrafterConfig.load(MODELS / "tiny-drafter").sliding_window
    assert drafts > 0
    # Every token but the last, which no step took as its root.
    assert found['longleaf_kv_pool_tokens{state="cached"}'] == 1500 + 20 - 1
    assert found['longleaf_drafter_span_tokens_sum{context_bucket="4k"}'] == drafts * (window - 1)


def test_the_last_trees_are_told_without_their_text(start_server: StartServer) -> None:
    server = start_server()
    assert server.get("/longleaf/trees").json == {"trees": []}
    usage = server.chat("Count from 3 to 90.", max_tokens=80, return_spec_tokens_details=True).json[
        "usage"
    ]
    trees = server.get("/longleaf/trees").json["trees"]
    assert len(trees) == min(8, usage["spec_tokens_details"]["steps"])
    assert set(trees[0]) == {"time", "context", "parents", "log_probs", "path"}
    # Each step begins where the one before ended.
    for earlier, later in pairwise(trees):
        assert later["context"] == earlier["context"] + len(earlier["path"])
        assert later["time"] >= earlier["time"]
    for tree in trees:
        assert all(tree["parents"][node] == before for before, node in pairwise(tree["path"]))
    last = trees[-1]
    assert last["context"] + len(last["path"]) + 1 == sum(
        usage[name] for name in ("prompt_tokens", "completion_tokens")
    )


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    one = server.post("/tokenize", {"prompt": "Hi 12 🙂"}).json
    assert list(one) == ["tokens", "count", "max_model_len"]
    assert (one["count"], one["max_model_len"]) == (len(one["tokens"]), 8192)
    assert server.post("/detokenize", {"tokens": one["tokens"]}).json == {"text": "Hi 12 🙂"}
    several = server.post("/tokenize", {"prompt": ["Hi 12 🙂", "b"]}).json
    assert several["tokens"][0] == one["tokens"]
    assert several["count"] == [one["count"], 1]
    both = server.post("/detokenize", {"tokens": several["tokens"]}).json
    assert both == {"text": ["Hi 12 🙂", "b"]}
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.post("/v1/tokenize", {"messages": messages}).json
    text = server.post("/detokenize", {"tokens": chat["tokens"], "skip_special_tokens": False}).json
    assert text == {"text": "<|endoftext|><|user|>Hi<|end|><|assistant|>"}
    reply = server.chat("Hi", max_tokens=1)
    assert reply.json["usage"]["prompt_tokens"] == chat["count"]
    assert server.post("/tokenize", {"prompt": "a", "messages": messages}).status == 400
    assert "Exactly one of 'prompt' or 'messages'" in server.post("/tokenize", {}).json["message"]
