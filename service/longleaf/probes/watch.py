"""``longleaf probe watch``: the commit probe on a schedule, as a target of Prometheus."""

import asyncio
import contextlib
import io
import logging
import signal

import click
from prometheus_client import CollectorRegistry, start_http_server

from longleaf.metrics import ProbeMetrics
from longleaf.options import FiniteRange, http_url
from longleaf.probes.baseline import Baseline, Expected
from longleaf.probes.client import ProbeError, find_server, session
from longleaf.probes.commit import CommitPlan, CommitRun, measure
from longleaf.probes.lengths import CONTEXTS_HELP, Contexts
from longleaf.probes.progress import Progress
from longleaf.probes.target import api_key_option, metrics_url_option, url_option

_PAUSE = 2.0
"""Seconds until a server that did not answer is asked again."""

logger = logging.getLogger(__name__)


@click.command("watch")
@url_option
@metrics_url_option
@click.option("--contexts", type=Contexts(), help=CONTEXTS_HELP)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Seeds.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option(
    "--every",
    default=21_600.0,
    show_default=True,
    type=FiniteRange(min=0, min_open=True),
    help="Seconds from one run's beginning to the next.",
)
@click.option(
    "--timeout",
    default=1800.0,
    show_default=True,
    type=FiniteRange(min=0, min_open=True),
    help="Seconds for one answer.",
)
@click.option(
    "--start-seconds",
    default=0.0,
    show_default=True,
    type=FiniteRange(min=0),
    help="Seconds that a run waits for a server that does not answer yet.",
)
@click.option(
    "--baseline",
    type=Baseline(),
    help="JSON of a good run of probe commit: what is expected.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of /metrics.")
@click.option(
    "--port", default=9401, show_default=True, type=click.IntRange(1, 65_535), help="Its port."
)
@api_key_option
def watch_command(
    url: str,
    metrics_url: str | None,
    contexts: tuple[int, ...] | None,
    repeats: int,
    max_tokens: int,
    every: float,
    timeout: float,
    start_seconds: float,
    baseline: Expected | None,
    host: str,
    port: int,
    api_key: str | None,
) -> None:
    """Run probe commit again and again, and serve what it found to Prometheus.

    The alerts LongleafCommitLenBelowProbe, LongleafProbeFailing and LongleafProbeStale read it.
    """
    plan = CommitPlan(
        url,
        metrics_url or f"{url}/metrics",
        contexts,
        repeats=repeats,
        max_tokens=max_tokens,
        timeout=timeout,
        metrics_required=metrics_url is not None,
        api_key=api_key,
    )
    try:
        watch(plan, baseline or {}, every, host, port, start_seconds)
    except OSError as error:
        raise click.ClickException(f"--host {host} --port {port}: {error.strerror}") from error


def watch(
    plan: CommitPlan,
    expected: Expected,
    every: float,
    host: str,
    port: int,
    start_seconds: float = 0.0,
) -> None:
    """Run ``plan`` every so many seconds until SIGINT or SIGTERM. ``OSError`` for a port in use.

    A run waits ``start_seconds`` for the server, and publishes nothing until then.
    """
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    registry = CollectorRegistry()
    metrics = ProbeMetrics(registry)
    metrics.max_age.labels("commit").set(2 * every + start_seconds + plan.timeout)
    metrics.timestamp.labels("commit").set_to_current_time()
    server, thread = start_http_server(port, host, registry)
    click.echo(f"{http_url(host, port)}/metrics")
    try:
        asyncio.run(_watch(plan, expected, every, metrics, start_seconds))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _watch(
    plan: CommitPlan,
    expected: Expected,
    every: float,
    metrics: ProbeMetrics,
    start_seconds: float,
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    while not stop.is_set():
        began = loop.time()
        running = asyncio.create_task(_once(plan, expected, metrics, start_seconds))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        left = max(0.0, began + every - loop.time())
        await asyncio.wait({stopped}, timeout=left)
        stopped.cancel()


async def _once(
    plan: CommitPlan, expected: Expected, metrics: ProbeMetrics, start_seconds: float = 0.0
) -> None:
    """One run. Whatever ends it, what is published is what this run knows."""
    run = CommitRun(plan)
    try:
        await _wait(plan, start_seconds)
        await measure(run, Progress(io.StringIO()))
    except Exception as error:
        known = isinstance(error, ProbeError)
        logger.error("%s: %s", type(error).__name__, error, exc_info=not known)
        run = CommitRun(plan)
    run.publish(metrics, expected)
    logger.info("%s", run.words())


async def _wait(plan: CommitPlan, seconds: float) -> None:
    """Until the server answers; after so many seconds whoever asks it next is told why not."""
    loop = asyncio.get_running_loop()
    deadline, said = loop.time() + seconds, ""
    async with session(plan.timeout) as http:
        while loop.time() < deadline:
            try:
                await find_server(http, plan.url, plan.api_key)
                return
            except ProbeError as error:
                if str(error) != said:
                    logger.info("waiting: %s", error)
                said = str(error)
            await asyncio.sleep(min(_PAUSE, max(0.0, deadline - loop.time())))
