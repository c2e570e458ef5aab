"""``longleaf cluster``."""

from pathlib import Path

import click

from longleaf.cluster import bundle
from longleaf.cluster.kubectl import Kubectl, KubectlError
from longleaf.cluster.status import rows, table


@click.group("cluster")
@click.option("--namespace", "-n", default="default", show_default=True, help="Of the release.")
@click.option("--release", default="longleaf", show_default=True, help="Name of the release.")
@click.option("--kubectl", default="kubectl", show_default=True, help="Program.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="As kubectl's.")
@click.option("--context", "cluster", help="As kubectl's.")
@click.pass_context
def cluster_command(
    context: click.Context,
    namespace: str,
    release: str,
    kubectl: str,
    kubeconfig: Path | None,
    cluster: str | None,
) -> None:
    """Look at a release in Kubernetes, drain one engine, collect a support bundle."""
    program = [kubectl]
    program += ["--kubeconfig", str(kubeconfig)] if kubeconfig else []
    program += ["--context", cluster] if cluster else []
    context.obj = Kubectl(tuple(program), namespace, release)


@cluster_command.command("status")
@click.pass_obj
def status_command(kubectl: Kubectl) -> None:
    """Pods and their nodes in one table."""
    try:
        click.echo(table(rows(kubectl.list("pods"), kubectl.list("nodes", "--ignore-not-found"))))
    except KubectlError as error:
        raise click.ClickException(str(error)) from error


@cluster_command.command("drain")
@click.argument("pod")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until it is gone.")
@click.option("--timeout", default=4000.0, show_default=True, help="Seconds to wait.")
@click.pass_obj
def drain_command(kubectl: Kubectl, pod: str, wait: bool, timeout: float) -> None:
    """Take one engine out: its node is cordoned, gateways let go of it, streams end, then it stops.

    Deleting the pod takes it off its Service first, which gateways follow; its preStop waits for
    them, and only then does the engine drain. `kubectl uncordon NODE` lets it come back.
    """
    try:
        found = {one["metadata"]["name"]: one for one in kubectl.list("pods")}
        labels = found.get(pod, {}).get("metadata", {}).get("labels", {})
        engines = sorted(
            name
            for name, one in found.items()
            if one["metadata"]["labels"].get("app.kubernetes.io/component") == "engine"
        )
        if labels.get("app.kubernetes.io/component") != "engine":
            raise click.BadParameter(f"no engine {pod!r}: {', '.join(engines) or 'there is none'}")
        node = found[pod]["spec"].get("nodeName")
        if node:
            click.echo(kubectl.run("cordon", node).strip())
        click.echo(
            kubectl.run(
                *("delete", "pod", pod, f"--wait={str(wait).lower()}", f"--timeout={timeout:.0f}s"),
                seconds=timeout + 30,
            ).strip()
        )
    except KubectlError as error:
        raise click.ClickException(str(error)) from error


@cluster_command.command("bundle")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_obj
def bundle_command(kubectl: Kubectl, path: Path) -> None:
    """Collect objects, events and logs into a .tar.gz, without secrets and prompts."""
    click.echo(f"{bundle.write(kubectl, path)} files in {path}")
