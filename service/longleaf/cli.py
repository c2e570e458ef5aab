"""The ``longleaf`` command."""

import click

from longleaf import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="longleaf")
def main() -> None:
    """Long-context chat served with tree-speculative decoding."""
