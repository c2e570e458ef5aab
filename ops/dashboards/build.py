"""Write the dashboards' JSON: ``python -m ops.dashboards.build``; ``--check`` compares instead."""

from pathlib import Path

import click

from ops.dashboards import gpu, serving, speculation
from ops.dashboards.panels import Board, to_json

DIRECTORY = Path(__file__).parent / "json"
BOARDS: tuple[Board, ...] = (serving.BOARD, speculation.BOARD, gpu.BOARD)


def stale() -> list[str]:
    """Names of the files that are not what the code builds."""
    expected = {f"{board.uid}.json": to_json(board) for board in BOARDS}
    found = {path.name: path.read_text() for path in DIRECTORY.glob("*.json")}
    return sorted(name for name in expected | found if expected.get(name) != found.get(name))


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail if a committed file is stale.")
def main(check: bool) -> None:
    """Build the dashboards."""
    if check:
        names = stale()
        if names:
            raise click.ClickException(f"run make dashboards: stale {', '.join(names)}")
        return
    DIRECTORY.mkdir(exist_ok=True)
    for board in BOARDS:
        (DIRECTORY / f"{board.uid}.json").write_text(to_json(board))


if __name__ == "__main__":
    main()
