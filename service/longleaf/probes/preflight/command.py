"""``longleaf preflight``."""

from pathlib import Path

import click

from longleaf.options import FiniteRange
from longleaf.probes.preflight.expected import Expected, parse_bytes
from longleaf.probes.preflight.facts import collect
from longleaf.probes.preflight.report import all_checks, document, line, run_checks
from longleaf.probes.preflight.trials import Trials
from longleaf.signals import raised

_PATH = click.Path(path_type=Path)
_POSITIVE = click.IntRange(min=1)
_SECONDS = FiniteRange(min=0, min_open=True)
_SHARE = FiniteRange(min=0, max=1, min_open=True, max_open=True)


def _bytes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("preflight")
@click.option("--gpus", type=_POSITIVE, default=8, show_default=True, help="GPUs, one a rank.")
@click.option("--product", "products", multiple=True, help="Name of an allowed GPU; repeat.")
@click.option("--compute-major", "compute_majors", type=int, multiple=True, help="Allowed; repeat.")
@click.option("--minimum-driver", help="Oldest driver.")
@click.option("--shared-memory", callback=_bytes, help="Least size of /dev/shm, such as 32Gi.")
@click.option("--target", type=_PATH, help="Directory of the target.")
@click.option("--drafter", type=_PATH, help="Directory of the drafter.")
@click.option("--block-size", type=_POSITIVE, help="Block that the drafter must have.")
@click.option("--nodes", type=_POSITIVE, help="Nodes of a tree.")
@click.option("--draft-window", type=_POSITIVE, help="Context rows of the windowed draft layers.")
@click.option("--context-length", type=_POSITIVE, help="Longest context.")
@click.option("--kv-pool-tokens", type=_POSITIVE, help="Tokens of the KV pool.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="As SGLang's.")
@click.option(
    "--memory-fraction",
    type=_SHARE,
    default=0.9,
    show_default=True,
    help="As SGLang's.",
)
@click.option(
    *("--kernel-timeout", "kernel_seconds"),
    type=_SECONDS,
    default=300.0,
    show_default=True,
    help="Seconds.",
)
@click.option(
    *("--nccl-timeout", "nccl_seconds"),
    type=_SECONDS,
    default=120.0,
    show_default=True,
    help="Seconds.",
)
@click.option("--skip", multiple=True, help="Check to leave out; repeat.")
@click.option("--list", "only_list", is_flag=True, help="Name the checks and run none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def preflight_command(
    context: click.Context,
    /,
    skip: tuple[str, ...],
    only_list: bool,
    as_json: bool,
    **asked: object,
) -> None:
    """Check that this node can run the engine: GPUs, memory, model files, kernels, NCCL.

    One line a check; each failure is one sentence and a fix. Ends with status 1 if one failed.
    """
    trials = Trials()
    names = list(all_checks(trials))
    if only_list:
        click.echo("\n".join(names))
        return
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise click.BadParameter(
            f"no check {unknown[0]!r}: {', '.join(names)}", param_hint="--skip"
        )
    expected = Expected(**asked)  # type: ignore[arg-type]
    verdicts = []
    # Ended as the first process of a container, it ends the ranks too.
    with raised():
        facts = collect()
        for verdict in run_checks(facts, expected, trials, skip):
            click.echo(line(verdict), err=as_json)
            verdicts.append(verdict)
    if as_json:
        click.echo(document(facts, verdicts))
    context.exit(1 if any(verdict.passed is False for verdict in verdicts) else 0)
