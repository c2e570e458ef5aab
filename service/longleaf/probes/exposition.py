"""What a /metrics says, of engines and of GPUs."""

import asyncio
import math

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from longleaf.probes.client import ProbeError

_SECONDS = 10.0
_MOST_BYTES = 8 << 20
"""Some 50,000 series: seconds to read, in which nothing else goes on."""
_ENGINE = {"longleaf_commit_len_count", "longleaf_kv_read_bytes_total"}
_GPU = "longleaf_gpu_"


async def engine_metrics(
    http: aiohttp.ClientSession, url: str, *, required: bool = False
) -> dict[str, float] | None:
    """The engine's families, summed over labels (``name``) and for each context bucket
    (``name@16k``). Where ``url`` does not serve them: None, or ``ProbeError`` if ``required``.
    """
    try:
        samples = await _scrape(http, url)
        if not _ENGINE & {sample.name for sample in samples}:
            raise ProbeError(f"{url} has no metrics of a Longleaf engine")
    except ProbeError:
        if required:
            raise
        return None
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith("longleaf_") and not sample.name.endswith("_bucket"):
            bucket = sample.labels.get("context_bucket")
            for name in (sample.name, f"{sample.name}@{bucket}")[: 2 if bucket else 1]:
                found[name] = found.get(name, 0.0) + sample.value
    return found


async def gpu_figures(http: aiohttp.ClientSession, url: str) -> dict[str, dict[str, float]]:
    """Values by GPU and metric, without ``longleaf_gpu_``; ``ProbeError`` where there are none."""
    found: dict[str, dict[str, float]] = {}
    for sample in await _scrape(http, url):
        if sample.name.startswith(_GPU) and set(sample.labels) == {"gpu"}:
            metric = sample.name.removeprefix(_GPU)
            found.setdefault(sample.labels["gpu"], {})[metric] = sample.value
    if not found:
        raise ProbeError(f"{url} tells nothing of a GPU: is it a GPU exporter?")
    return found


async def _body(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES >> 20} MiB")
    return bytes(body)


async def _scrape(http: aiohttp.ClientSession, url: str) -> list[Sample]:
    """Samples with a finite value; ``ProbeError`` if there is no exposition in a few seconds."""
    try:
        async with asyncio.timeout(_SECONDS), http.get(url) as answer:
            if answer.status != 200:
                raise ProbeError(f"{url}: status {answer.status}")
            text = (await _body(answer.content)).decode()
        families = list(text_string_to_metric_families(text))
    except TimeoutError as error:
        raise ProbeError(f"{url}: no answer in {_SECONDS:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ProbeError(f"{url}: {type(error).__name__}: {error}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise ProbeError(f"{url} is no Prometheus text: {error}") from error
    samples = (sample for family in families for sample in family.samples)
    return [sample for sample in samples if math.isfinite(sample.value)]
