"""What the probes read of /metrics, good and bad."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from longleaf.probes.client import ProbeError
from longleaf.probes.exposition import engine_metrics, gpu_figures

pytestmark = pytest.mark.anyio

ENGINE = b"""# TYPE longleaf_commit_len histogram
longleaf_commit_len_bucket{context_bucket="1k",le="1.0"} 2
longleaf_commit_len_count{context_bucket="1k",tp_rank="0"} 2
longleaf_commit_len_count{context_bucket="16k",tp_rank="0"} 3
longleaf_commit_len_sum{context_bucket="1k"} NaN
longleaf_drafter_window_tokens 2047
sglang:num_running_reqs 1
"""
GPUS = b"""longleaf_gpu_power_watts{gpu="0"} 80
longleaf_gpu_power_watts{gpu="1"} 90
longleaf_gpu_dram_active_ratio{gpu="1"} NaN
longleaf_gpu_metric_supported{metric="power_watts",source="nvml"} 1
"""


@asynccontextmanager
async def serving(
    body: bytes, status: int = 200
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status, headers={"content-type": "text/plain"})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        yield http, str(server.make_url("/metrics"))


async def test_families_are_summed_and_told_by_bucket() -> None:
    async with serving(ENGINE) as (http, url):
        assert await engine_metrics(http, url) == {
            "longleaf_commit_len_count": 5,
            "longleaf_commit_len_count@1k": 2,
            "longleaf_commit_len_count@16k": 3,
            "longleaf_drafter_window_tokens": 2047,
        }


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (ENGINE, 503, "status 503"),
        (b"up 1\n", 200, "no metrics of a Longleaf engine"),
        (b"longleaf_commit_len_count abc\n", 200, "is no Prometheus text"),
        (b"\xff\xfe\xfa", 200, "is no Prometheus text"),
        (b"<html>", 200, "is no Prometheus text"),
        (ENGINE + b"x_total 1\n" * (1 << 20), 200, "it is longer than 8 MiB"),
    ],
)
async def test_metrics_that_are_none(body: bytes, status: int, said: str) -> None:
    async with serving(body, status) as (http, url):
        assert await engine_metrics(http, url) is None
        with pytest.raises(ProbeError, match=said):
            await engine_metrics(http, url, required=True)
        with pytest.raises(ProbeError):
            await gpu_figures(http, url)


async def test_figures_are_of_each_gpu_and_nan_is_absent() -> None:
    async with serving(GPUS) as (http, url):
        assert await gpu_figures(http, url) == {"0": {"power_watts": 80}, "1": {"power_watts": 90}}
    async with serving(b'longleaf_gpu_power_watts{gpu="0"} NaN\n') as (http, url):
        with pytest.raises(ProbeError, match="tells nothing of a GPU"):
            await gpu_figures(http, url)
