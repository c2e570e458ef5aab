"""Reads SGLang's arguments, a JSON list of lists on standard input, with SGLang's own parser.

Runs where `make test-engine` has installed SGLang; prints what each list was read as, or why it is
refused. A name that is only the beginning of an option's counts as unknown, though argparse takes
it.
"""

import argparse
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Register the plugin as an installed one would be, and parse."""
    sys.path[:0] = [str(ROOT), str(ROOT / "service"), str(ROOT / "kernels")]
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder, "longleaf-0.1.0.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: longleaf\nVersion: 0.1.0\n"
        )
        (metadata / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nlongleaf = longleaf.engine.plugin:register\n"
        )
        sys.path.insert(0, folder)
        from tests.engine import stubs

        stubs.install()
        warnings.simplefilter("ignore")  # SGLang's own, about the GPU that is missing
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        from longleaf.engine import check

        load_plugins()
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        known = parser._option_string_actions
        lists = json.load(sys.stdin)
        print(json.dumps([_read(words, known, check.parse) for words in lists], default=str))


def _read(words: Sequence[str], known: Collection[str], parse: Callable[..., Any]) -> Any:
    from longleaf.engine import switches
    from longleaf.engine.drift import DriftError

    named = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [word for word in named if word not in known]
    if unknown:
        return f"SGLang knows no {', '.join(unknown)}"
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            read = parse(words)
        switches.refuse(read)
        return vars(read)
    except DriftError as error:
        return str(error)
    except SystemExit:
        return said.getvalue().splitlines()[-1]


if __name__ == "__main__":
    main()
