"""Gather a training's logs and tables into ops/results/tiny-train-h200.json.

    python record.py RUN_FOLDER... [--cpu TABLE.json]

Each RUN_FOLDER holds train.log of one train.py run; the last also eval.json. --cpu adds a table
measured on a CPU with more prompts.
"""

import argparse
import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "results" / "tiny-train-h200.json"
PREDICTABLE = ("repeat", "count", "boilerplate")
Row = dict[str, Any]


def training_rows(logs: list[str]) -> list[Row]:
    seconds, target_tokens, draft_tokens = 0.0, 0, 0
    for text in logs:
        at, _ = re.findall(r"\[ *([\d.]+)\] (exported)", text)[-1]
        seconds += float(at)
        target_tokens += int(re.findall(r"target done \d+ steps (\d+) tokens", text)[-1])
        draft_tokens += int(re.findall(r"drafter done \d+ steps (\d+) draft tokens", text)[-1])
    losses = re.findall(r"held-out losses \{(.*)\}", logs[-1])[-1]
    return [
        {
            "name": "training_seconds",
            "value": round(seconds, 1),
            "unit": "s",
            "bar": 1500,
            "better": "lower",
        },
        {"name": "target_tokens", "value": target_tokens, "unit": "tokens"},
        {"name": "drafter_tokens", "value": draft_tokens, "unit": "draft positions"},
        *(
            {
                "name": f"held_out_loss_{name}",
                "value": float(value),
                "unit": "nats/token",
                "better": "lower",
            }
            for name, value in re.findall(r"'(\w+)': ([\d.]+)", losses)
        ),
    ]


def commit_rows(table: list[Row], suffix: str) -> list[Row]:
    out: list[Row] = []
    at_1k = None
    for context in sorted({row["context"] for row in table if row["kind"] == "repeat"}):
        rows = {row["kind"]: row for row in table if row["context"] == context}
        label = f"{context // 1024}k{suffix}"
        mean = sum(rows[k]["tree"] for k in PREDICTABLE) / len(PREDICTABLE)
        at_1k = at_1k or mean
        bar = 5.0 if context == 1024 else round(0.85 * at_1k, 2)
        out.append(
            {
                "name": f"predictable_{label}",
                "value": round(mean, 2),
                "unit": "tokens/step",
                "bar": bar,
                "better": "higher",
                "n": sum(rows[k]["prompts"] for k in PREDICTABLE),
            }
        )
        for kind, row in rows.items():
            if kind == "chat":
                continue
            bars = {"prose": [1.2, 3.5]}.get(kind)
            out.append(
                {
                    "name": f"{kind}_{label}",
                    "value": row["tree"],
                    "unit": "tokens/step",
                    **({"bar": bars, "better": "between"} if bars else {}),
                    "n": row["prompts"],
                    "spread": [row["lowest"], row["highest"]],
                    "chain": row["chain"],
                    "distinct_8grams": row["distinct8"],
                    "draft_accuracy_by_depth": row["accuracy"],
                }
            )
            if kind in ("prose", "code"):
                out.append(
                    {
                        "name": f"tree_over_chain_{kind}_{label}",
                        "value": row["ratio"],
                        "unit": "ratio",
                        "bar": 1.10,
                        "better": "higher",
                        "n": row["prompts"],
                    }
                )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--cpu", type=Path)
    options = parser.parse_args()
    logs = [(run / "train.log").read_text() for run in options.runs]
    rows = training_rows(logs)
    rows += commit_rows(json.loads((options.runs[-1] / "eval.json").read_text())["table"], "")
    if options.cpu:
        rows += commit_rows(json.loads(options.cpu.read_text())["table"], "_cpu_float32")
    gpu, driver = logs[-1].splitlines()[0].split(", ")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=OUT.parent, text=True, capture_output=True, check=True
    ).stdout.strip()
    value = {
        "bench": "tiny-train",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": {"cpu": None, "gpu": gpu, "driver": driver},
        "command": "the three runs of ops/tiny/README.md, then ops/tiny/evaluate.py",
        "rows": rows,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(value, indent=1) + "\n")
    missed = [
        r["name"]
        for r in rows
        if "bar" in r
        and not (
            r["bar"][0] <= r["value"] <= r["bar"][1]
            if r["better"] == "between"
            else r["value"] >= r["bar"]
            if r["better"] == "higher"
            else r["value"] <= r["bar"]
        )
    ]
    print(OUT, len(rows), "rows; below their bar:", missed or "none")


if __name__ == "__main__":
    main()
