"""The ``longleaf`` command: one subcommand a part, each imported only when it is called."""

import importlib
from collections.abc import Mapping

import click

from longleaf import __version__

COMMANDS: Mapping[str, str] = {
    "capacity": "longleaf.capacity.command:capacity_command",
    "cluster": "longleaf.cluster.command:cluster_command",
    "embedded": "longleaf.embedded.command:embedded_command",
    "engine": "longleaf.engine.launch:engine_command",
    "exporter": "longleaf.exporters.command:exporter_command",
    "gateway": "longleaf.gateway.command:gateway_command",
    "preflight": "longleaf.probes.preflight.command:preflight_command",
    "probe": "longleaf.probes.command:probe_command",
    "serve": "longleaf.serve.command:serve_command",
    "simulate": "longleaf.simulate.command:simulate_command",
}


class _LazyGroup(click.Group):
    """A gateway pod must not pay for importing the engine, so commands load by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="longleaf")
def main() -> None:
    """Long-context chat served with tree-speculative decoding."""
