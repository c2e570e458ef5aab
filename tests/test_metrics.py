"""The one module of metric definitions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from longleaf.metrics import CONTEXT_BUCKETS, EngineLoad, SglangMetrics, context_bucket


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        *((0, "1k"), (1, "1k"), (1024, "1k"), (1025, "4k"), (4096, "4k"), (4097, "16k")),
        *((16_384, "16k"), (16_385, "32k"), (32_769, "64k"), (65_536, "64k"), (65_537, "128k")),
        *((131_072, "128k"), (131_073, "200k"), (200_000, "200k"), (200_001, "inf")),
    ],
)
def test_context_buckets_have_inclusive_upper_bounds(tokens: int, bucket: str) -> None:
    assert context_bucket(tokens) == bucket
    assert bucket in CONTEXT_BUCKETS


def test_load_is_asked_at_every_scrape() -> None:
    registry = CollectorRegistry()
    running = 0

    def load() -> EngineLoad:
        return EngineLoad(running, 2, 0.5, 30, 60, 7.5, 0.25, 3.5, 0.2, 11)

    SglangMetrics(registry, "tiny", load)
    for running in (1, 4):
        text = generate_latest(registry).decode()
        assert f'sglang:num_running_reqs{{model_name="tiny"}} {running}.0' in text
    assert 'sglang:spec_accept_length{model_name="tiny"} 3.5' in text
    assert "# TYPE sglang:token_usage gauge" in text
    assert "# TYPE sglang:spec_verify_calls_total counter" in text
    assert 'sglang:spec_verify_calls_total{model_name="tiny"} 11.0' in text


WRITER = """
import os, sys
from prometheus_client import CollectorRegistry
from longleaf.metrics import EngineMetrics
metrics = EngineMetrics(CollectorRegistry())
metrics.kv_pool_tokens.labels("free").set(int(sys.argv[1]))
metrics.drafter_window_tokens.set(2048)
metrics.commit_len.labels("1k").observe(4)
"""


def test_of_several_processes_gauges_are_the_latest_and_counts_are_sums(tmp_path: Path) -> None:
    """An engine that restarts leaves files behind: its pool must not be there twice."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for free in (5, 7):
        command = [sys.executable, "-c", WRITER, str(free)]
        subprocess.run(command, env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]
    text = generate_latest(registry).decode()
    assert re.findall(r"^longleaf_kv_pool_tokens\S* .*$", text, re.M) == [
        'longleaf_kv_pool_tokens{state="free"} 7.0'
    ]
    assert "longleaf_drafter_window_tokens 2048.0" in text
    assert 'longleaf_commit_len_sum{context_bucket="1k"} 8.0' in text
