"""Kinds of command-line values that click has not, and how addresses are written."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A number within bounds; not a number, and infinity, which no bound holds off, are none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """As click's, and finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def http_url(host: str, port: int) -> str:
    """The URL of what listens there; IPv6 addresses have brackets in it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
