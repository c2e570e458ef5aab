"""What probes are pointed at: addresses, and the key that they show there."""

from urllib.parse import urlsplit

import click


class Url(click.ParamType[str]):
    """``http://host:port``, perhaps with a path; without a slash at the end."""

    name = "url"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Check it; credentials in it would be written to every report."""
        text = str(value)
        try:
            found = urlsplit(text)
            whole = found.scheme in ("http", "https") and found.hostname and found.port != 0
        except ValueError:
            whole = False
        if not whole or not text.isprintable() or " " in text:
            self.fail(f"{text!r} is no URL such as http://127.0.0.1:30000", param, ctx)
        if found.username is not None or found.password is not None:
            self.fail("credentials do not belong into a URL: --api-key", param, ctx)
        return text.rstrip("/")


class ApiKey(click.ParamType[str]):
    """What a header can hold; blanks around it, as files end with, are no part of it."""

    name = "text"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Strip and check; the key itself is not told."""
        key = str(value).strip()
        if not key.isascii() or not key.isprintable() or " " in key:
            self.fail("a key is of printable ASCII characters, without blanks", param, ctx)
        return key


url_option = click.option(
    "--url", required=True, type=Url(), help="Base URL of the gateway or an engine."
)
metrics_url_option = click.option(
    "--metrics-url",
    type=Url(),
    help="Engine's /metrics, to check the figures against.  [default: URL/metrics]",
)
api_key_option = click.option(
    "--api-key",
    type=ApiKey(),
    envvar="LONGLEAF_PROBE_API_KEY",
    show_envvar=True,
    help="Key that the server demands.",
)
