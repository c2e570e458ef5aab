"""Everything that can be checked without a model in memory: ``python -m longleaf.engine.check``.

It runs in a process of its own before the server's, for it imports SGLang; it takes the server's
arguments, and ends with status 0, or with status 2 after one line that says what has drifted.
"""

import argparse
import errno
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from longleaf.engine import guard, model_check, switches
from longleaf.engine.drift import EXIT_CODE, GUARD_VARIABLE, DriftError
from longleaf.engine.model_check import Arguments
from longleaf.engine.warmup import CLIENT_VARIABLE, Client


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence: SGLang's usage alone is four hundred lines."""

    def error(self, message: str) -> NoReturn:
        raise DriftError(
            f"SGLang's parser refuses: {message}", "longleaf engine -- --help lists its arguments"
        )


def parse(argv: Sequence[str]) -> Any:
    """Return the arguments as SGLang's own parser reads them; the plugin must be registered."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="longleaf engine --")
    ServerArgs.add_cli_args(parser)
    arguments = list(argv)
    if "--config" in arguments:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger

        try:
            arguments = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
        except DriftError:
            raise
        except Exception as error:  # whatever reading YAML may raise
            raise DriftError(
                f"--config cannot be read ({_one_line(error)})", "give a YAML file of arguments"
            ) from error
    return parser.parse_args(arguments)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def check_models(parsed: Any) -> None:
    """Check arguments, environment, and the configs of target and drafter, of a start with ours."""
    if not switches.ours(parsed):
        return
    switches.refuse(parsed)
    given = Arguments(
        draft_tokens=parsed.speculative_num_draft_tokens,
        block_size=parsed.speculative_dflash_block_size,
        draft_window=parsed.speculative_draft_window_size,
        page_size=parsed.page_size,
        context_length=parsed.context_length,
        attention_backend=parsed.attention_backend,
        kv_cache_dtype=parsed.kv_cache_dtype,
    )
    model_check.check_arguments(given)
    _check_environment()
    target = model_check.read_config(Path(parsed.model_path), "target")
    model_check.check_target(target)
    _check_heads(target, parsed.tp_size)
    if not switches.wants_trees(parsed):
        return
    if parsed.speculative_draft_model_path is None:
        raise DriftError("DDTREE needs a drafter", "--speculative-draft-model-path DIRECTORY")
    drafter = model_check.read_config(Path(parsed.speculative_draft_model_path), "drafter")
    model_check.check_pair(target, drafter, given)

    from longleaf.engine.algorithm import planned_nodes

    planned_nodes(model_check.drafter_block(drafter), given.draft_tokens, given.page_size)


def _check_environment() -> None:
    from sglang.srt.environ import envs

    from longleaf.engine import extend

    simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if simulated > 0:
        raise DriftError(
            f"SGLANG_SIMULATE_ACC_LEN is {simulated}: DDTREE does not simulate acceptance",
            "unset it",
        )
    for read in (extend.chosen_varlen, extend.absorbed_extend_tokens):
        try:
            read()
        except ValueError as error:
            raise DriftError(str(error), "correct or unset it") from error


def _check_heads(target: Mapping[str, Any], ranks: int) -> None:
    from longleaf_kernels.verify import MAX_HEADS

    heads = target.get("num_attention_heads")
    if heads is None:
        return
    if ranks < 1 or heads % ranks or heads // ranks > MAX_HEADS:
        raise DriftError(
            f"--tp-size is {ranks}, the target has {heads} heads: each GPU takes the same number "
            f"of them, 1 to {MAX_HEADS}",
            f"give a divisor of {heads}",
        )


def resolve(parsed: Any) -> Any:
    """Return the ServerArgs that the server will make of these arguments.

    Raises DriftError for whatever SGLang, or DDTREE when SGLang asks it, refuses.
    """
    from sglang.srt.server_args import ServerArgs

    if parsed.device is None and switches.ours(parsed):
        parsed.device = "cuda"
    try:
        args = ServerArgs.from_cli_args(parsed)
        args.check_server_args()
    except DriftError:
        raise
    except Exception as error:  # it asserts, and raises what the libraries it asks raise
        raise DriftError(
            f"SGLang refuses its arguments ({_one_line(error)})", "correct the argument it names"
        ) from error
    return args


def check_resolved(args: Any) -> None:
    """Check what SGLang has made of the arguments: its defaults depend on model and GPU."""
    if not switches.ours(args):
        return
    import torch
    from sglang.srt.model_executor.cuda_graph_config import Backend

    switches.refuse(args)
    model_check.check_arguments(
        Arguments(page_size=args.page_size, kv_cache_dtype=args.kv_cache_dtype)
    )
    found = args.cuda_graph_config.prefill.backend
    if found != Backend.DISABLED:
        raise DriftError(
            f"SGLang would capture prefill graphs ({found}): longleaf_mla chooses the form of "
            "every extend by its length, which no prefill graph can",
            "--disable-prefill-cuda-graph",
        )
    dtype = args.get_model_config().dtype
    if dtype != torch.bfloat16:
        raise DriftError(f"longleaf_mla computes in bfloat16, got {dtype}", "--dtype bfloat16")


def check_address(args: Any) -> None:
    """Check that a server of these ServerArgs can listen.

    SGLang finds out minutes later, and until then whoever listens there would be taken for it.
    """
    try:
        found = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Every one is tried: a taken one counts although another is free.
        if not sum(
            _can_bind(family, kind, protocol, address)
            for family, kind, protocol, _, address in found
        ):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        raise DriftError(
            f"the server cannot listen at --host {args.host} --port {args.port} ({error.strerror})",
            "give an address of this machine and a free port",
        ) from error


def _can_bind(
    family: socket.AddressFamily, kind: socket.SocketKind, protocol: int, address: Any
) -> bool:
    """Return False for an address that the machine lacks: a name may have one of a family that is
    switched off, which servers leave out. OSError for one that is taken.
    """
    try:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def server_client(args: Any) -> Client:
    """Return how a server of these ServerArgs is reached from its own machine."""
    return Client(args.url(), args.api_key, args.ssl_certfile)


def check_all(argv: Sequence[str], *, gpu: bool = True) -> Any:
    """Run every check; without ``gpu``, those of torch's build and the kernels' library are left
    out. Returns the ServerArgs of the server to be.
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
    parsed = parse(argv)
    switches.refuse_at_launch(parsed)
    check_models(parsed)
    args = resolve(parsed)
    check_resolved(args)
    return args


def main(argv: Sequence[str]) -> int:
    """Run every check and return the exit status.

    Where a start follows, the address must be free, and the launcher is told where it will be.
    """
    os.environ.setdefault(GUARD_VARIABLE, "1")
    told = os.environ.get(CLIENT_VARIABLE)
    try:
        args = check_all(argv)
        if told is not None:
            check_address(args)
    except DriftError as error:
        print(f"longleaf engine: {error}", file=sys.stderr)
        return EXIT_CODE
    except Exception as error:  # a start that was not checked is not one to go on with
        kind = type(error).__name__
        print(
            f"longleaf engine: the check itself failed ({kind}: {_one_line(error)}); fix: report "
            "it with these arguments",
            file=sys.stderr,
        )
        return EXIT_CODE
    if told is not None:
        with open(int(told), "w") as pipe:
            json.dump(asdict(server_client(args)), pipe)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
