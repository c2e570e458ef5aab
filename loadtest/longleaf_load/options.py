"""Options of a run: added to Locust's own."""

import json
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longleaf import embedded
from longleaf_load.lengths import PlanError
from longleaf_load.plan import Plan, load_plan
from longleaf_load.prompts import PromptCounter, PromptSource
from longleaf_load.run import Run
from longleaf_load.sessions import check_lengths
from longleaf_load.slo import parse_slo

SMOKE = Path(__file__).resolve().parents[1] / "plans" / "smoke.toml"
_ASK_SECONDS = 10.0


def add_options(parser: Any) -> None:
    """Add them to an argument parser."""
    add = parser.add_argument_group("Longleaf").add_argument
    add("--plan", default=str(SMOKE), help="Plan: arrivals, lengths, texts (TOML).")
    add("--rate", type=float, default=1.0, help="Factor on the plan's rates.")
    add("--longer", type=float, default=1.0, help="Factor on the seconds of the plan's phases.")
    add("--plan-seed", type=int, default=None, help="Instead of the plan's seed.")
    add("--model-name", default="", help="Served model (default: the first that is listed).")
    add("--served-tokenizer", default="", help="Directory of the served tokenizer.json.")
    add("--slo", nargs="*", default=[], metavar="NAME=VALUE", help="ttft_ms=2000 tpot_ms=50 …")
    add("--out", default="build/load", help="Folder of the report.")


def check_run(options: Any, url: str) -> str:
    """All that can be wrong with a run, told before it starts; the model that it asks for."""
    check_url(url)
    parse_slo(options.slo)
    check_lengths(_plan(options), PromptCounter(served_tokenizer(options)))
    return served_model(url, _key(), options.model_name)


def open_run(options: Any, url: str | None) -> Run:
    """Read the plan and the texts; ``options`` are ``load_workers``, too. ``PlanError`` says what
    is wrong; the key of the API is ``LONGLEAF_API_KEY``. A model that is named is not looked up:
    ``check_run`` did, and a worker must not wait while its master may start it.
    """
    if not url:
        raise PlanError("--host is missing: the gateway's URL")
    check_url(url)
    plan, key = _plan(options), _key()
    source = PromptSource(served_tokenizer(options), plan.longest, plan.seed)
    check_lengths(plan, source)
    model = options.model_name or served_model(url, key, "")
    return Run(
        plan=plan,
        source=source,
        slo=parse_slo(options.slo),
        url=url,
        model=model,
        key=key,
        workers=options.load_workers,
        out=Path(options.out),
        plan_name=Path(options.plan).stem,
    )


def _plan(options: Any) -> Plan:
    return load_plan(Path(options.plan), options.rate, options.plan_seed, options.longer)


def _key() -> str | None:
    return os.environ.get("LONGLEAF_API_KEY") or None


def check_url(url: str) -> None:
    """``PlanError`` where it is none that requests can go to."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, or the port
        right = False
    if not right:
        raise PlanError(f"{url!r} is no URL like http://host:8080")


def served_model(url: str, key: str | None, name: str) -> str:
    """``name`` if it is served, the first model that is where it is empty. ``PlanError`` where it
    is not listed, or where nothing is and it is empty: a server need not list what is asked for by
    its name.
    """
    try:
        listed = _models(url, key)
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        if name:
            return name
        raise PlanError(f"{url} does not list its models: {error}") from None
    if name and name not in listed:
        raise PlanError(f"--model-name: {url} serves {', '.join(listed)}, not {name!r}")
    return name or listed[0]


def _models(url: str, key: str | None) -> list[str]:
    """All that are listed, one at least."""
    request = urllib.request.Request(url.rstrip("/") + "/v1/models")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:
        listed = [str(model["id"]) for model in json.loads(answer.read())["data"]]
    if not listed:
        raise LookupError("the list is empty")
    return listed


def served_tokenizer(options: Any) -> Path:
    """Where the served tokenizer lies: the tiny model's by default. ``PlanError`` where none is."""
    if options.served_tokenizer:
        directory = Path(options.served_tokenizer)
        if not (directory / "tokenizer.json").is_file():
            raise PlanError(f"--served-tokenizer: no tokenizer.json in {directory}")
        return directory
    return Path(embedded.__file__).parent / "models" / "tiny-target"
