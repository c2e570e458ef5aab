"""What an earlier run of the commit probe found, as what is expected of later ones."""

import json
import math
from pathlib import Path
from typing import Any

import click

Expected = dict[tuple[str, int], float]
"""commit_len by text and context."""


class Baseline(click.ParamType[Expected]):
    """The JSON that ``longleaf probe commit`` wrote."""

    name = "file"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Expected:
        """Read it; a file that is something else is named."""
        if isinstance(value, dict):
            return value
        try:
            return expected_of(json.loads(Path(str(value)).read_text()))
        except OSError as error:
            self.fail(f"{value}: {error.strerror}", param, ctx)
        except (ValueError, LookupError, TypeError):
            self.fail(f"{value} is no JSON of a commit probe", param, ctx)


def expected_of(found: dict[str, Any]) -> Expected:
    """commit_len by text and context of an earlier run's JSON; ``ValueError`` if it has none."""
    means = {
        (str(cell["text"]), int(cell["context"])): float(cell["mean"])
        for cell in found["cells"]
        if cell["mean"] is not None
    }
    if not means or not all(math.isfinite(mean) for mean in means.values()):
        raise ValueError("no commit_len was measured")
    return means
