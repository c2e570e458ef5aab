"""Make the service's plugin an installed distribution in a folder on PYTHONPATH, without pip.

SGLang finds plugins by entry point; an entry point needs a .dist-info folder, not an installation.
``python -m ops.gpu.plugin_distribution FOLDER``.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import click

SERVICE = Path(__file__).resolve().parents[2] / "service"


def entry_points_text(groups: Mapping[str, Mapping[str, str]]) -> str:
    """entry_points.txt of a distribution with these groups of name = object."""
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    )


def install(folder: Path, name: str, target: str) -> Path:
    """Make ``target`` (module:function) SGLang's plugin ``name`` for who has folder on its path."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        entry_points_text({"sglang.srt.plugins": {name: target}})
    )
    return folder


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(folder: Path) -> None:
    """Write FOLDER/longleaf-VERSION.dist-info from service/pyproject.toml."""
    project = tomllib.loads((SERVICE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(entry_points_text(project.get("entry-points", {})))


if __name__ == "__main__":
    main()
