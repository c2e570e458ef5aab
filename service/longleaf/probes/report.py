"""What every probe leaves behind: JSON, a page, and lines of a table."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def document(probe: str, url: str, *, partial: bool, **fields: Any) -> dict[str, Any]:
    """The JSON document. ``partial``: the run was interrupted, and holds what it had by then."""
    return {
        "probe": probe,
        "url": url,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "partial": partial,
        **fields,
    }


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write ``found``, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def write_page(path: Path, page: str) -> None:
    """Write an HTML page, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def lines(table: Sequence[Sequence[str]]) -> str:
    """``table`` aligned: its first row is a head, its first column text."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
