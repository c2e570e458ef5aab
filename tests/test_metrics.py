"""The one module of metric definitions."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

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
