"""``longleaf probe watch``: the commit probe on a schedule, as a target of Prometheus."""

import asyncio
import io
import logging
import signal
from collections.abc import Mapping

import click
from prometheus_client import CollectorRegistry, start_http_server

from longleaf.metrics import ProbeMetrics
from longleaf.probes.client import ProbeError
from longleaf.probes.commit import CommitPlan, CommitRun, measure
from longleaf.probes.progress import Progress

logger = logging.getLogger(__name__)


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
