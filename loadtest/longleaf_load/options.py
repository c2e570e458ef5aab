"""Options of a run: added to Locust's own."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from longleaf import embedded
from longleaf_load.lengths import PlanError
from longleaf_load.plan import load_plan
from longleaf_load.prompts import PromptSource
from longleaf_load.run import Run
from longleaf_load.slo import parse_slo

SMOKE = Path(__file__).resolve().parents[1] / "plans" / "smoke.toml"
_ASK_SECONDS = 10.0


def add_options(parser: Any) -> None:
    """Add them to an argument parser."""
    add = parser.add_argument_group("Longleaf").add_argument
    add("--plan", default=str(SMOKE), help="Plan: arrivals, lengths, texts (TOML).")
    add("--rate", type=float, default=1.0, help="Factor on the plan's rates.")
    add("--plan-seed", type=int, default=None, help="Instead of the plan's seed.")
    add("--model-name", default="", help="Served model (default: the first that is listed).")
    add("--served-tokenizer", default="", help="Directory of the served tokenizer.json.")
    add("--slo", nargs="*", default=[], metavar="NAME=VALUE", help="ttft_ms=2000 tpot_ms=50 …")
    add("--out", default="build/load", help="Folder of the report.")
    add("--load-workers", type=int, default=1, help="Processes that share the arrivals.")


def open_run(options: Any, url: str | None) -> Run:
    """Read the plan and the texts. ``PlanError`` says what is wrong; the key of the API is
    ``LONGLEAF_API_KEY``.
    """
    if not url:
        raise PlanError("--host is missing: the gateway's URL")
    plan = load_plan(Path(options.plan), options.rate, options.plan_seed)
    key = os.environ.get("LONGLEAF_API_KEY")
    model = options.model_name or first_model(url, key)
    return Run(
        plan=plan,
        source=PromptSource(served_tokenizer(options), plan.longest, plan.seed),
        slo=parse_slo(options.slo),
        url=url,
        model=model,
        key=key,
        workers=options.load_workers,
        out=Path(options.out),
        plan_name=Path(options.plan).stem,
    )


def first_model(url: str, key: str | None) -> str:
    """The first model that is served. ``PlanError`` where nothing answers."""
    request = urllib.request.Request(url.rstrip("/") + "/v1/models")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:
            return str(json.loads(answer.read())["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise PlanError(f"{url} does not list its models: {error}") from None


def served_tokenizer(options: Any) -> Path:
    """Where the served tokenizer lies: the tiny model's by default."""
    if options.served_tokenizer:
        return Path(options.served_tokenizer)
    return Path(embedded.__file__).parent / "models" / "tiny-target"
