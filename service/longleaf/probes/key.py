"""The key that probes show the server they ask."""

import click

api_key_option = click.option(
    "--api-key",
    envvar="LONGLEAF_PROBE_API_KEY",
    show_envvar=True,
    help="Key that the server demands.",
)
