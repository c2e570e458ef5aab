"""``python -m longleaf_load``: run a plan, or compare two reports."""

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from longleaf_load.lengths import PlanError, lengths, tokens
from longleaf_load.options import (
    add_options,
    check_run,
    check_url,
    served_model,
    served_tokenizer,
)
from longleaf_load.prompts import PromptSource
from longleaf_load.recording import Recorder
from longleaf_load.report import compare_lines, compare_page, compare_rows
from longleaf_load.run import machine

_COMMIT_ANSWERS = 12
_MOST_WORKERS = 256
_MOST_PORT = 65_535
_LOOPBACK = "127.0.0.1"
_LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"


def main(arguments: Sequence[str]) -> int:
    """Run; the exit status is 1 where the objective was missed, 2 for wrong arguments, 3 where
    the run was stopped before its end or lost a worker.
    """
    parser = argparse.ArgumentParser(prog="longleaf_load", description=__doc__)
    parser.add_argument("--url", help="Base URL of the gateway, or of an engine.")
    parser.add_argument("--workers", type=int, default=1, help="Processes that send.")
    apart = parser.add_mutually_exclusive_group()
    apart.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="Send nothing: wait here for --workers that --join from anywhere.",
    )
    apart.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="Be a worker of the run that listens there; the rest as it was told.",
    )
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="Show two reports."
    )
    parser.add_argument(
        "--record-curve", metavar="NAME", help="Record the curve of the engine at --url instead."
    )
    parser.add_argument("--contexts", default="256,1k,4k", help="Contexts to record.")
    parser.add_argument("--batches", default="1,2,4", help="Batches to record.")
    parser.add_argument(
        "--prompts",
        help="Lengths of prompts to record commit_len from: the traffic's, written as in a plan.  "
        "[log_uniform over the contexts]",
    )
    parser.add_argument(
        "--answers",
        default="128",
        help="Lengths of answers to record commit_len from: the traffic's, written as in a plan.",
    )
    parser.add_argument(
        "--machine", help="What the recorded engine runs on, such as '8 x NVIDIA H200'."
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        if options.compare:
            first, second = options.compare
            return compare(first, second, Path(options.out))
        if not options.url:
            parser.error("--url is missing")
        if not 1 <= options.workers <= _MOST_WORKERS:
            parser.error(f"--workers must be between 1 and {_MOST_WORKERS}, got {options.workers}")
        if options.record_curve:
            return record_curve(options)
        sharing = _sharing(options)
        options.model_name = check_run(options, options.url)
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except PlanError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out: {error.filename}: {error.strerror}")
    return _become_locust([*_locust_arguments(options), *sharing])


def _become_locust(arguments: Sequence[str]) -> NoReturn:
    """Locust takes this process: its signals, its exit status."""
    os.execv(sys.executable, [sys.executable, "-m", "locust", *arguments])


def compare(first: Path, second: Path, out: Path) -> int:
    """Print two reports beside each other and write the page."""
    reports = [_report(path) for path in (first, second)]
    rows = compare_rows(reports[0], reports[1])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print("\n".join(compare_lines(reports[0], reports[1])))
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.html").write_text(compare_page(reports[0], reports[1]))
    print(f"page: {out / 'compare.html'}", file=sys.stderr)
    return 0


def record_curve(options: argparse.Namespace) -> int:
    """Record an engine's curve and commit_len as ``NAME.json`` and ``NAME-commit_len.json``."""
    check_url(options.url)
    if "/" in options.record_curve:
        raise PlanError(f"--record-curve must be a name, not a path, got {options.record_curve!r}")
    contexts = sorted({tokens(word, "--contexts") for word in options.contexts.split(",")})
    batches = sorted({tokens(word, "--batches") for word in options.batches.split(",")})
    answers = lengths(options.answers, "--answers")
    between = f"log_uniform {contexts[0]} {contexts[-1]}"
    prompts = lengths(between if options.prompts is None else options.prompts, "--prompts")
    seed = 1 if options.plan_seed is None else options.plan_seed
    recorder = Recorder(
        options.url,
        served_model(options.url, None, options.model_name),
        PromptSource(served_tokenizer(options), max(contexts[-1], prompts.most), seed),
        seed,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    about = {"name": options.record_curve, **machine(), **recorder.about(options.machine)}
    recorder.check(contexts, batches)
    kinds = recorder.commits(prompts, answers, _COMMIT_ANSWERS)
    found = {**about, **recorder.curve(contexts, batches)}
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, document in (("", found), ("-commit_len", {**about, "kinds": kinds})):
        path = out / f"{options.record_curve}{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(path, file=sys.stderr)
    return 0


def _report(path: Path) -> Any:
    """A report that can be shown: all that one is shown by is tried on it."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        for show in (compare_lines, compare_rows, compare_page):
            show(report, report)
    except OSError as error:
        raise PlanError(f"--compare: {path} cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise PlanError(f"--compare: {path} is no report: it has no {error}") from None
    except RecursionError:
        raise PlanError(f"--compare: {path} is no report: it is nested too deep") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise PlanError(f"--compare: {path} is no report: {error}") from None
    return report


def _locust_arguments(options: argparse.Namespace) -> list[str]:
    workers = str(options.workers)
    arguments = ["-f", str(_LOCUSTFILE), "--headless", "--only-summary", "--host", options.url]
    arguments += ["--loglevel", "WARNING", "--load-workers", workers, "--plan", options.plan]
    arguments += ["--rate", str(options.rate), "--longer", str(options.longer)]
    arguments += ["--out", options.out]
    if options.plan_seed is not None:
        arguments += ["--plan-seed", str(options.plan_seed)]
    for name, value in (
        ("--model-name", options.model_name),
        ("--served-tokenizer", options.served_tokenizer),
    ):
        if value:
            arguments += [name, value]
    return arguments + (["--slo", *options.slo] if options.slo else [])


def _sharing(options: argparse.Namespace) -> list[str]:
    """Locust's options that say who sends: this process, children of it, or others."""
    workers = str(options.workers)
    if options.join:
        host, port = _address(options.join, "--join")
        print(f"worker of the run at {host}:{port}", file=sys.stderr)
        return ["--worker", "--master-host", host, "--master-port", str(port)]
    arguments = ["-u", workers, "-r", workers, "--csv", str(Path(options.out) / "locust")]
    if options.listen:
        host, port = _address(options.listen, "--listen")
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            raise PlanError(f"--listen {options.listen}: {error.strerror}") from None
        print(f"waiting for {workers} workers at {host}:{port}", file=sys.stderr)
        arguments += ["--master", "--expect-workers", workers]
        return [*arguments, "--master-bind-host", host, "--master-bind-port", str(port)]
    if options.workers > 1:
        own = str(_free_port())  # the usual one may have another run's master, or its workers
        arguments += ["--processes", workers, "--master-bind-host", _LOOPBACK]
        arguments += ["--master-bind-port", own, "--master-host", _LOOPBACK, "--master-port", own]
    return arguments


def _address(text: str, field: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or ":" in host or not port.isdecimal() or not 1 <= int(port[:6]) <= _MOST_PORT:
        raise PlanError(f"{field} must be HOST:PORT, such as 10.0.0.5:5557, got {text!r}")
    return host, int(port)


def _free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as one:
        port: int = one.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
