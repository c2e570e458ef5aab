"""``longleaf exporter``."""

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from prometheus_client import CollectorRegistry, start_http_server

from longleaf.exporters.cupti import CuptiPm
from longleaf.exporters.dcgm import Dcgm
from longleaf.exporters.gpu import GpuExporter
from longleaf.exporters.nvml import Nvml, NvmlGpm
from longleaf.exporters.recording import Recorder, load_recording, save_recording
from longleaf.exporters.source import LEAST_INTERVAL, Source
from longleaf.metrics import GpuMetrics
from longleaf.options import FiniteRange, http_url

SOURCES: Mapping[str, Callable[[], Source]] = {
    source.name: source for source in (NvmlGpm, Dcgm, CuptiPm, Nvml)
}
"""In the order in which they are asked."""
_LEAST_EXPIRY = 15.0
"""Seconds for which a sample holds at least: DCGM may take ten to answer."""


@click.group("exporter")
def exporter_command() -> None:
    """Publish what Prometheus scrapes beside the service itself."""


@exporter_command.command("gpu")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of /metrics.")
@click.option(
    "--port", default=9400, show_default=True, type=click.IntRange(1, 65535), help="Its port."
)
@click.option(
    "--interval",
    default=1.0,
    show_default=True,
    type=FiniteRange(min=LEAST_INTERVAL, max=60.0),
    help="Seconds between samples.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what the sources say there, at the end.",
)
@click.option(
    "--replay",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Publish a recording; asks no GPU.",
)
@click.option(
    "--source",
    "names",
    multiple=True,
    type=click.Choice(tuple(SOURCES)),
    help="Ask this source only, or these.  [default: all of them, in this order]",
)
@click.option("--note", default="", help="Where the recording is taken, and of what.")
def gpu_command(
    host: str,
    port: int,
    interval: float,
    record: Path | None,
    replay: Path | None,
    names: tuple[str, ...],
    note: str,
) -> None:
    """Tensor pipes, memory, residency, power, clocks and PCIe of each GPU.

    Sources in order: NVML's GPM counters, DCGM 4, CUPTI's PM sampling, NVML. A metric that none of
    them tells is absent, and longleaf_gpu_metric_supported says 0; figures older than 15 s, or
    three intervals if that is more, are withdrawn. On an H200, ten samples a second of NVML's cost
    2 to 5.3 % of a core, four cost 2.5 to 4.8 %, and the loads beside them 0.3 % at most.
    """
    logging.basicConfig(level="INFO", format="%(message)s")
    sources = [make() for name, make in SOURCES.items() if name in names or not names]
    if replay is not None:
        try:
            sources = list(load_recording(replay))
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{replay}: {error}", param_hint="--replay") from error
    recorders = [Recorder(source) for source in sources]
    if record is not None:
        try:
            save_recording(record, recorders, note)
        except OSError as error:
            raise click.BadParameter(f"{error}", param_hint="--record") from error
    registry = CollectorRegistry()
    metrics = GpuMetrics(registry, expiry=max(_LEAST_EXPIRY, 3 * interval))
    exporter = GpuExporter(recorders if record is not None else sources, metrics)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise click.ClickException(f"--host {host} --port {port}: {error.strerror}") from error
    click.echo(f"{http_url(host, port)}/metrics")
    try:
        while True:
            exporter.sample()
            if stop.wait(interval):
                break
    finally:
        exporter.close()
        server.shutdown()
        server.server_close()
        thread.join()
        if record is not None:
            save_recording(record, recorders, note)
