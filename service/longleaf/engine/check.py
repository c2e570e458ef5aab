"""Everything that can be checked without a model in memory: ``python -m longleaf.engine.check``.

It runs in a process of its own before the server's, for it imports SGLang; it takes the server's
arguments, and ends with status 0, or with status 2 after one line that says what has drifted.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longleaf.engine import guard, model_check, switches
from longleaf.engine.drift import EXIT_CODE, GUARD_VARIABLE, DriftError
from longleaf.engine.model_check import Arguments


def parse(argv: Sequence[str]) -> Any:
    """Return the arguments as SGLang's own parser reads them; the plugin must be registered."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="longleaf engine --", exit_on_error=True)
    ServerArgs.add_cli_args(parser)
    arguments = list(argv)
    if "--config" in arguments:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger

        arguments = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    return parser.parse_args(arguments)


def check_models(parsed: Any) -> None:
    """Check page size, KV type, and the configs of target and drafter."""
    given = Arguments(
        draft_tokens=parsed.speculative_num_draft_tokens,
        block_size=parsed.speculative_dflash_block_size,
        draft_window=parsed.speculative_draft_window_size,
        page_size=parsed.page_size,
        context_length=parsed.context_length,
        attention_backend=parsed.attention_backend,
        kv_cache_dtype=parsed.kv_cache_dtype,
    )
    trees = switches.wants_trees(parsed)
    if not trees and not switches.wants_backend(parsed):
        return
    switches.refuse(parsed)
    model_check.check_arguments(given)
    target = model_check.read_config(Path(parsed.model_path), "target")
    model_check.check_target(target)
    if not trees:
        return
    if parsed.speculative_draft_model_path is None:
        raise DriftError("DDTREE needs a drafter", "--speculative-draft-model-path DIRECTORY")
    drafter = model_check.read_config(Path(parsed.speculative_draft_model_path), "drafter")
    model_check.check_pair(target, drafter, given)


def check_all(argv: Sequence[str], *, gpu: bool = True) -> None:
    """Run every check; without ``gpu``, those of torch's build and the kernels' library are left
    out.
    """
    guard.check_versions()
    guard.check_sources()
    if gpu:
        import torch

        guard.check_platform(torch.__version__, torch.version.cuda)
        guard.check_kernels()
    from sglang.srt.plugins import load_plugins

    # Before the patches, which change what is checked.
    guard.check_signatures()
    load_plugins()
    guard.check_plugin_installed()
    guard.check_registrations()
    check_models(parse(argv))


def main(argv: Sequence[str]) -> int:
    """Run every check and return the exit status."""
    os.environ.setdefault(GUARD_VARIABLE, "1")
    try:
        check_all(argv)
    except DriftError as error:
        print(f"longleaf engine: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
