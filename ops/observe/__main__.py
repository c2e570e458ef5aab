"""``make observe``: the service on this machine, Prometheus (and Alertmanager) watching it."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from ops.observe.options import Address, Duration, answers, require_free
from ops.observe.prometheus import (
    StartError,
    Target,
    configuration,
    running_alertmanager,
    running_gpu_exporter,
    running_prometheus,
)
from ops.observe.replay import replaying
from ops.observe.service import Service

RECORDING = Path(__file__).parent / "recordings" / "h200" / "longleaf-verify-64k.json"
NOT_OF_HERE = "longleaf_gpu_memory_peak_bytes_per_second"
"""What a CPU reads is no share of the recorded card's peak."""
_PORT = click.IntRange(1, 65_535)


@contextlib.contextmanager
def _start_errors_told() -> Iterator[None]:
    try:
        yield
    except StartError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.option("--port", default=8080, show_default=True, type=_PORT, help="Public API.")
@click.option("--metrics-port", default=9080, show_default=True, type=_PORT, help="Gateway.")
@click.option("--engine-port", default=30000, show_default=True, type=_PORT, help="Engine.")
@click.option("--prometheus-port", default=9090, show_default=True, type=_PORT)
@click.option("--alertmanager-port", default=9093, show_default=True, type=_PORT)
@click.option("--gpu-port", default=9400, show_default=True, type=_PORT, help="GPU recording.")
@click.option("--probe-port", default=9401, show_default=True, type=_PORT, help="Probe.")
@click.option(
    "--interval", default="5s", show_default=True, type=Duration(), help="Of scrapes and rules."
)
@click.option(
    "--gpu-exporter", type=Address(), help="A GPU exporter to scrape.  [an H200's recording]"
)
@click.option(
    "--textfile",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that a probe writes (--textfile), to scrape too; repeat.",
)
@click.option("--load/--no-load", default=False, show_default=True, help="Send requests too.")
@click.option(
    "--probe/--no-probe", default=True, show_default=True, help="Run longleaf probe watch too."
)
def main(
    port: int,
    metrics_port: int,
    engine_port: int,
    prometheus_port: int,
    alertmanager_port: int,
    gpu_port: int,
    probe_port: int,
    interval: str,
    gpu_exporter: str | None,
    textfile: tuple[Path, ...],
    load: bool,
    probe: bool,
) -> None:
    """Run the service with Prometheus and Alertmanager beside it, until Ctrl-C."""
    ports = {
        "--port": port,
        "--metrics-port": metrics_port,
        "--engine-port": engine_port,
        "--prometheus-port": prometheus_port,
        "--alertmanager-port": alertmanager_port,
    }
    if gpu_exporter is None:
        ports["--gpu-port"] = gpu_port
    if probe:
        ports["--probe-port"] = probe_port
    require_free(ports)
    targets = [
        Target("longleaf-gateway", f"127.0.0.1:{metrics_port}"),
        Target("longleaf-engine", f"127.0.0.1:{engine_port}"),
    ]
    if probe:
        targets.append(Target("longleaf-probe", f"127.0.0.1:{probe_port}"))
    with _start_errors_told(), contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longleaf-")))
        if gpu_exporter is None:
            recorded = running_gpu_exporter(directory, port=gpu_port, recording=RECORDING)
            targets.append(Target("longleaf-gpu", stack.enter_context(recorded), drop=NOT_OF_HERE))
            click.echo("GPU metrics: the recording of an H200 (--gpu-exporter names a real one)")
        else:
            targets.append(Target("longleaf-gpu", gpu_exporter))
            if not answers(gpu_exporter):
                click.echo(f"--gpu-exporter {gpu_exporter}: nothing answers there yet", err=True)
        if textfile:
            for path in textfile:
                if not path.exists():
                    click.echo(f"--textfile {path}: not there yet", err=True)
            files = stack.enter_context(replaying(*textfile))
            targets.append(Target("longleaf-probe-files", f"127.0.0.1:{files}"))
        try:
            alerts = stack.enter_context(running_alertmanager(directory, port=alertmanager_port))
            click.echo(f"alertmanager  http://{alerts}")
        except FileNotFoundError as error:
            click.echo(f"without Alertmanager: {error}", err=True)
            alerts = None
        config = configuration(targets, interval=interval, namespace="local", alertmanager=alerts)
        try:
            prometheus = stack.enter_context(
                running_prometheus(directory, config, port=prometheus_port)
            )
        except FileNotFoundError as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"prometheus    {prometheus.url}")
        click.echo(f"status page   http://127.0.0.1:{metrics_port}/ui, once the service is ready")
        service = Service(port, metrics_port, engine_port, probe_port if probe else None, load)
        sys.exit(asyncio.run(service.run(directory)))


if __name__ == "__main__":
    main()
