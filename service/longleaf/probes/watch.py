"""``longleaf probe watch``: the commit probe on a schedule, as a target of Prometheus."""

import asyncio
import io
import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path

import click
from prometheus_client import CollectorRegistry, start_http_server

from longleaf.metrics import ProbeMetrics
from longleaf.probes.client import ProbeError
from longleaf.probes.commit import CommitPlan, CommitRun, expected_of, measure
from longleaf.probes.lengths import Contexts
from longleaf.probes.progress import Progress

logger = logging.getLogger(__name__)


@click.command("watch")
@click.option("--url", required=True, help="Base URL of the gateway or an engine.")
@click.option(
    "--metrics-url", help="Engine's /metrics, to check the figures against.  [default: URL/metrics]"
)
@click.option("--contexts", default="1k,16k,64k", show_default=True, type=Contexts())
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="Seeds.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option(
    "--every",
    default=21_600.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds from one run's beginning to the next.",
)
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds for one answer.")
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of a good run of probe commit: what is expected.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of /metrics.")
@click.option(
    "--port", default=9401, show_default=True, type=click.IntRange(1, 65_535), help="Its port."
)
def watch_command(
    url: str,
    metrics_url: str | None,
    contexts: tuple[int, ...],
    repeats: int,
    max_tokens: int,
    every: float,
    timeout: float,
    baseline: Path | None,
    host: str,
    port: int,
) -> None:
    """Run probe commit again and again, and serve what it found to Prometheus.

    The alerts LongleafCommitLenBelowProbe and LongleafProbeFailing read it.
    """
    base = url.rstrip("/")
    plan = CommitPlan(
        base,
        metrics_url or f"{base}/metrics",
        contexts,
        repeats=repeats,
        max_tokens=max_tokens,
        timeout=timeout,
    )
    expected = {} if baseline is None else expected_of(json.loads(baseline.read_text()))
    try:
        watch(plan, expected, every, host, port)
    except OSError as error:
        raise click.ClickException(f"--port {port}: {error.strerror}") from error


def watch(
    plan: CommitPlan,
    expected: Mapping[tuple[str, int], float],
    every: float,
    host: str,
    port: int,
) -> None:
    """Run ``plan`` every so many seconds until SIGINT or SIGTERM. ``OSError`` for a port in use."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    registry = CollectorRegistry()
    metrics = ProbeMetrics(registry)
    server, thread = start_http_server(port, host, registry)
    click.echo(f"http://{host}:{port}/metrics")
    try:
        asyncio.run(_watch(plan, dict(expected), every, metrics))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _watch(
    plan: CommitPlan, expected: dict[tuple[str, int], float], every: float, metrics: ProbeMetrics
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    while not stop.is_set():
        began = loop.time()
        running = asyncio.create_task(_once(plan, expected, metrics))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        left = max(0.0, began + every - loop.time())
        await asyncio.wait({stopped}, timeout=left)
        stopped.cancel()


async def _once(
    plan: CommitPlan, expected: dict[tuple[str, int], float], metrics: ProbeMetrics
) -> None:
    """One run. Where nothing could be measured, that is what is published."""
    run = CommitRun.of(plan)
    try:
        await measure(run, Progress(io.StringIO()))
    except ProbeError as error:
        for cell in run.cells:
            cell.why = str(error)
    run.publish(metrics, expected)
    said = run.judgement()
    logger.info("%s: %s", said.verdict, said.words)
