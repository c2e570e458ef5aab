"""What the engine's GPU tests and benches compute, without a GPU."""

import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from longleaf.simulate.curve import CurveError, parse_curve
from ops.bench.results import Row
from ops.gpu.batches import shared_steps
from ops.gpu.client import Event, Generation
from ops.gpu.curves import RECORDED, curve_of
from ops.gpu.judge import partings, wrong
from ops.gpu.models import DummyDrafter, DummyTarget, stretch_tiny_pair
from ops.gpu.pairs import tiny
from ops.gpu.payload import LOCK, wanted
from ops.gpu.plot import context_of, curves, floor, name_of, step_time_plot
from ops.gpu.report import merged, rows_of
from ops.gpu.servers import Method
from ops.gpu.shares import shares
from ops.gpu.timing import random_prompt, step_timing
from tests.gpu.engine.histograms import two_sample_p_value


def generation(tokens: list[int], **changes: object) -> Generation:
    plain = Generation(
        tokens=tuple(tokens),
        text="",
        finish="length",
        prompt_tokens=4,
        cached_tokens=0,
        steps=0,
        events=(),
        begin=0.0,
        meta={},
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_step_time_is_the_gap_of_events_and_the_mean_counts_steps() -> None:
    events = tuple(Event(0.5 + 0.01 * i, 1 + 4 * i, 0) for i in range(11))
    timing = step_timing(generation(list(range(41)), steps=10, events=events))
    assert timing.ms == pytest.approx(10.0)
    assert timing.mean_ms == pytest.approx(10.0)
    assert timing.tokens_per_step == 4.0


def test_shared_steps_count_only_while_all_decode() -> None:
    """The first is alone for 20 steps of 5 ms; then both take 10 ms a step, 60 of them."""
    alone = [0.005 * step for step in range(20)]
    both = [0.1 + 0.01 * step for step in range(61)]
    seconds, steps = shared_steps([[*alone, *both, 0.71, 0.72], both])
    assert seconds == pytest.approx(0.01)
    assert steps == pytest.approx(56)  # the second's, from its fourth event to its last but one


def test_answers_that_were_not_together_are_no_batch() -> None:
    first, second = ([begin + 0.01 * step for step in range(256)] for begin in (0.0, 2.5))
    with pytest.raises(ValueError, match=r"2 answers shared -?[0-9]+ steps of at least 32"):
        shared_steps([first, second])


def measured_batches(**changes: object) -> dict[str, object]:
    def step(batch: int, context: int, ms: float) -> dict[str, object]:
        return {"server": "ddtree-9", "batch": batch, "context": context, "ms": ms}

    document: dict[str, object] = {
        "machine": {"gpu": "NVIDIA H200", "driver": "1.2"},
        "batches": [step(2, 1024, 6.0), step(1, 1024, 4.0), step(1, 1024, 5.0), step(1, 1024, 9.0)],
        "prefills": [{"server": "ddtree-9", "context": 1024, "cached": 0, "seconds": 0.25}],
    }
    return document | changes


def test_a_curve_takes_the_median_of_its_runs() -> None:
    curve = parse_curve(curve_of(RECORDED[0], measured_batches(), "abc1234"), "measured")
    assert curve.name == "h200-ddtree"
    assert curve.source["commit"] == "abc1234"
    assert curve.step_seconds([1024]) == 0.005
    assert curve.step_seconds([1000, 1048]) == 0.006
    assert curve.prompt_seconds(1024) == 0.25
    assert curve.kv_bytes_per_token == 61 * (512 + 64) * 2


def test_a_measurement_without_prefills_is_no_curve() -> None:
    with pytest.raises(CurveError, match="h200-ddtree: prefill must be a list of at least one"):
        curve_of(RECORDED[0], measured_batches(prefills=[]), "abc1234")


def test_a_prompt_begins_like_a_shorter_one() -> None:
    assert random_prompt(100)[:40] == random_prompt(40)


def test_partings_know_rounding_from_faults() -> None:
    top = [[[-0.5, 1, None], [-0.6, 9, None], [-3.0, 7, None]]] * 3
    reference = generation([1, 1, 1], meta={"output_top_logprobs": top})
    near, far, unknown, shorter = (
        partings([generation(tokens)], [reference])
        for tokens in ([1, 9, 1], [1, 1, 7], [8, 1, 1], [1, 1])
    )
    assert near[0].position == 1
    assert near[0].gap == pytest.approx(0.1)
    assert wrong(near) == []
    assert wrong(far) == far
    assert wrong(unknown) == unknown
    assert wrong(shorter) == shorter
    assert partings([generation([1, 1, 1])], [reference]) == []


def test_of_tokens_that_tie_either_may_be_reported_first() -> None:
    top = [[[-0.5, 9, None], [-0.5, 1, None]]]
    reference = generation([1], meta={"output_top_logprobs": top})
    assert [item.gap for item in partings([generation([9])], [reference])] == [0.0]


def test_the_two_sample_test_finds_a_bias_and_no_more() -> None:
    draw = random.Random(1)
    fair = [[draw.choice("aabc") for _ in range(1500)] for _ in range(40)]
    values = [two_sample_p_value(a, b) for a, b in zip(fair[::2], fair[1::2], strict=True)]
    assert min(values) > 1e-3
    biased = [draw.choice("aabbc") for _ in range(1500)]
    assert two_sample_p_value(fair[0], biased) < 1e-5


def test_shares_add_up_kernels_and_gaps() -> None:
    events = [
        {"name": "verify_mla<9>", "ts": 0, "dur": 10},
        {"name": "accept_greedy", "ts": 15, "dur": 2},
        {"name": "nvjet_gemm", "ts": 16, "dur": 4},
        {"name": "verify_mla<9>", "ts": 30, "dur": 10},
    ]
    found = shares(events)
    assert found.groups == {"attention": 0.5, "matrix products": 0.1, "accept": 0.05}
    assert found.idle == 0.375
    assert (found.gaps[0].microseconds, found.gaps[0].after) == (10.0, "nvjet_gemm")


def test_rows_say_what_was_not_measured() -> None:
    step = {"server": "ddtree-9", "context": 1024, "ms": 6.0, "spread": [5.0, 7.0], "steps": 9}
    last = step | {"context": 185_000, "ms": 12.0}
    rows = {row.name: row for row in rows_of({"steps": [step, last]})}
    assert rows["ddtree_step_ms_1k"].met
    assert rows["flatness_185k_over_1k"].value == 2.0
    assert rows["ddtree_step_ms_64k"].why == "not measured"
    assert rows["soak_leaked_tokens"].value is None


def test_rows_say_up_to_where_absorbed_extends_win_and_what_a_profile_found() -> None:
    spread = {"context": 32_768, "spread": [1.0, 2.0], "n": 4}
    extends = [
        {"server": f"extend-{name}", "new": new, "ms": ms, **spread}
        for new, times in ((64, (5.0, 8.0)), (256, (9.0, 8.5)))
        for name, ms in zip(("absorbed", "up-torch"), times, strict=True)
    ]
    steps = {
        "count": 30,
        "phases": {"draft": 1.0, "total": 9.0},
        "host": {"kernels": 60.0, "graphs": 2.0, "copies": 9.0, "operators": 200.0},
        "gaps": [
            {
                "microseconds": 80.0,
                "between": ["verify", "accept"],
                "kernels": ["gemm", "argmax"],
                "remedy": "capture it",
            }
        ],
    }
    profile = {
        "server": "ddtree-9",
        "context": 65_536,
        "groups": {"attention": 0.5},
        "idle": 0.1,
        "phases_ms": {"draft": 1.02},
    }
    profiled = {
        "server": "ddtree-9",
        "context": 65_536,
        "steps": steps,
        "disagreement": 0.02,
        "disagreeing_phase": "draft",
    }
    document = {"extends": extends, "profile": [profile], "profiled_steps": [profiled]}
    rows = {row.name: row for row in rows_of(document)}
    assert rows["extend_32k_absorbed_wins_to"].value == 64
    assert "extend_128k_absorbed_wins_to" not in rows
    assert rows["extend_32k_256_up_torch_ms"].value == 8.5
    assert rows["profile_64k_gap_1_us"].why == (
        "verify -> accept, longest gemm -> argmax; capture it"
    )
    assert rows["phases_metrics_vs_profiler"].met
    assert rows["host_64k_kernels"].value == 60.0


def test_absorbed_extends_win_only_as_far_as_they_do_without_a_break() -> None:
    spread = {"context": 32_768, "spread": [1.0, 2.0], "n": 4}
    times = {16: (5.0, 8.0), 64: (9.0, 8.5), 128: (5.0, 8.0)}
    extends = [
        {"server": f"extend-{name}", "new": new, "ms": ms, **spread}
        for new, pair in times.items()
        for name, ms in zip(("absorbed", "up-torch"), pair, strict=True)
    ]
    rows = {row.name: row for row in rows_of({"extends": extends})}
    assert rows["extend_32k_absorbed_wins_to"].value == 16


def test_runs_of_single_parts_are_put_together() -> None:
    step = {"server": "ddtree-9", "context": 1024, "ms": 6.0, "spread": [5.0, 7.0], "steps": 9}
    first = {"machine": {"gpu": "a"}, "steps": [step, step | {"context": 8192}]}
    second = {"machine": {"gpu": "b"}, "steps": [step | {"ms": 5.0}], "soak_leaked_tokens": 0}
    rows = {row.name: row.value for row in rows_of(merged([first, second]))}
    assert rows["ddtree_step_ms_1k"] == 5.0
    assert rows["ddtree_step_ms_8k"] == 6.0
    assert rows["soak_leaked_tokens"] == 0
    assert merged([first, second])["machine"] == {"gpu": "b"}


def test_the_plot_draws_measured_rows() -> None:
    rows = [Row("ddtree_step_ms_1k", 6.0, "ms"), Row("stock_dflash_step_ms_32k", 308.0, "ms")]
    found = curves({"name": row.name, "value": row.value} for row in rows)
    assert sorted(found.values()) == [[(1024, 6.0)], [(32_768, 308.0)]]
    assert {context_of(name_of(c)) for c in (1024, 185_000)} == {1024, 185_000}
    assert floor([185_000])[0][1] == pytest.approx(2.99, abs=0.01)
    root = ElementTree.fromstring(step_time_plot(found))
    assert len(root.findall(".//{*}polyline")) == 4


def test_a_servers_options_reach_its_command() -> None:
    spec = tiny(Method.DDTREE, nodes=(1, 9))
    words = spec.command(31_000, Path("r"))
    assert words[words.index("--speculative-algorithm") + 1] == "DDTREE"
    assert words[words.index("--attention-backend") + 1] == "longleaf_mla"
    assert spec.variables()["LONGLEAF_ENGINE"] == '{"nodes": [1, 9]}'
    stock = tiny(Method.STOCK_PLAIN)
    assert stock.variables()["SGLANG_PLUGINS"] == "none"
    assert "--speculative-algorithm" not in stock.command(31_000, Path("r"))


def test_models_hold_together(tmp_path: Path) -> None:
    target = DummyTarget()
    drafter = DummyDrafter(target=target).config()
    assert max(drafter["dflash_config"]["target_layer_ids"]) <= target.layers - 2
    assert drafter["vocab_size"] == target.config()["vocab_size"]
    assert (target.write(tmp_path / "t") / "tokenizer.json").exists()
    for folder in stretch_tiny_pair(tmp_path, 65_536):
        assert '"max_position_embeddings": 65536' in (folder / "config.json").read_text()


def test_the_payload_keeps_what_servers_load() -> None:
    assert wanted("sgl_kernel/sm90/common_ops.abi3.so")
    assert not wanted("sgl_kernel/sm100/common_ops.abi3.so")
    assert wanted("tvm_ffi/lib/libtvm_ffi_testing.so")  # imported by its core module
    assert wanted("xgrammar-0.2.7.dist-info/RECORD")  # by which it finds its library
    assert not wanted("flashinfer/data/cutlass/include/cutlass/cutlass.h")
    assert "sglang==0.5.17" in LOCK.read_text()
