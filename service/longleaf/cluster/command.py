"""``longleaf cluster``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from longleaf.signals import raised

if TYPE_CHECKING:
    from longleaf.cluster.client import Cluster, Object


@dataclass(frozen=True, slots=True)
class Where:
    """What the group's options say."""

    kubeconfig: Path | None
    context: str | None
    namespace: str
    release: str


@contextmanager
def _cluster(where: Where) -> Iterator[Cluster]:
    """The cluster; its errors as a command's."""
    try:
        from longleaf.cluster.client import Cluster, ClusterError
    except ImportError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install kubernetes (longleaf's extra `cluster`)"
        ) from error
    from urllib3.exceptions import InsecureRequestWarning

    from longleaf.cluster.drain import DrainError

    try:
        cluster = Cluster.connected(where.kubeconfig, where.context, where.namespace, where.release)
        try:
            with warnings.catch_warnings():
                # Of a kubeconfig that wants no verification, which kubectl says nothing of either.
                warnings.simplefilter("ignore", InsecureRequestWarning)
                yield cluster
        finally:
            cluster.close()
    except (ClusterError, DrainError) as error:
        raise click.ClickException(str(error)) from error


@click.group("cluster")
@click.option("--namespace", "-n", default="default", show_default=True, help="Of the release.")
@click.option("--release", default="longleaf", show_default=True, help="Name of the release.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="As kubectl's.")
@click.option("--context", "cluster", help="As kubectl's.")
@click.pass_context
def cluster_command(
    context: click.Context,
    namespace: str,
    release: str,
    kubeconfig: Path | None,
    cluster: str | None,
) -> None:
    """Look at a release in Kubernetes, drain one engine, collect a support bundle."""
    context.obj = Where(kubeconfig, cluster, namespace, release)


@cluster_command.command("status")
@click.pass_obj
def status_command(where: Where) -> None:
    """Replicas and nodes in one table; below it what keeps pods from being ready."""
    with _cluster(where) as cluster:
        from longleaf.cluster.reasons import reasons
        from longleaf.cluster.status import rows, table

        cluster.expect_release()
        pods, nodes = cluster.pods(), _allowed("nodes", cluster.nodes)
        workloads = [
            *_allowed("stateful sets", cluster.stateful_sets),
            *_allowed("deployments", cluster.deployments),
        ]
        events = _allowed("events", cluster.events)
        click.echo(table(rows(pods, nodes)))
        for reason in reasons(pods, workloads, events):
            click.echo(reason)


def _allowed(what: str, ask: Callable[[], list[Object]]) -> list[Object]:
    """What is asked for, as far as the account may see it."""
    from longleaf.cluster.client import RefusedError

    try:
        return ask()
    except RefusedError as error:
        click.echo(f"{what} are not to be had: {error}", err=True)
        return []


@cluster_command.command("drain")
@click.argument("pod")
@click.option("--cordon/--no-cordon", default=True, show_default=True, help="Its node too.")
@click.option("--only", is_flag=True, help="Even where no other engine is ready.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until it is gone.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for each step. Default: the pod's grace period, and a minute.",
)
@click.pass_obj
def drain_command(
    where: Where, pod: str, cordon: bool, only: bool, wait: bool, timeout: float | None
) -> None:
    """Take one engine out: gateways let go of it, then it is evicted, and its answers end.

    Its node is cordoned before. Disruption budgets hold; what cannot be done is undone, also when
    this command is ended.
    """
    with raised(), _cluster(where) as cluster:
        from longleaf.cluster.drain import Drain, DrainConfig

        Drain(cluster, DrainConfig(cordon, only, wait, timeout), click.echo).run(pod)


@cluster_command.command("bundle")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_obj
def bundle_command(where: Where, path: Path) -> None:
    """Collect objects, events and logs into a .tar.gz, without secrets and prompts."""
    with _cluster(where) as cluster:
        from longleaf.cluster import bundle

        try:
            click.echo(f"{bundle.write(cluster, path)} files in {path}")
        except OSError as error:
            raise click.ClickException(f"{path} cannot be written: {error}") from error
