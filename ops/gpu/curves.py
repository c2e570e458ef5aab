"""The curves that `longleaf simulate` and `longleaf capacity` come with.

``python -m ops.gpu.curves FILE … --commit C`` writes
service/longleaf/simulate/curves/h200-*.json of what ``ops.gpu.measure --part batches`` wrote, once
or several times.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from longleaf.simulate.curve import CURVES, parse_curve
from ops.gpu.measure import BENCH_NODES
from ops.gpu.models import DummyTarget
from ops.gpu.report import merged


@dataclass(frozen=True, slots=True)
class Recorded:
    """A server of the measurement, and the curve that is made of it."""

    server: str
    name: str
    engine: str
    nodes: int


RECORDED = (
    Recorded(
        f"ddtree-{BENCH_NODES}",
        "h200-ddtree",
        f"SGLang 0.5.17 with DDTREE, {BENCH_NODES} verified nodes",
        BENCH_NODES,
    ),
    Recorded(
        "ours-plain",
        "h200-plain",
        "SGLang 0.5.17, plain decoding over this project's attention backend",
        1,
    ),
)


def curve_of(recorded: Recorded, document: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """A curve's JSON object, as `longleaf.simulate.curve` reads it; medians over the runs.

    Raises:
        CurveError: where the measurement holds no steps or no prefill of the server.
    """

    def medians(section: str, figure: str, *keys: str) -> list[tuple[tuple[int, ...], float]]:
        found: dict[tuple[int, ...], list[float]] = {}
        for row in document.get(section, []):
            if row["server"] == recorded.server:
                found.setdefault(tuple(row[key] for key in keys), []).append(row[figure])
        return sorted((point, statistics.median(values)) for point, values in found.items())

    model = DummyTarget().config()
    curve = {
        "name": recorded.name,
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": document["machine"]["gpu"],
        "driver": document["machine"]["driver"],
        "commit": commit,
        "engine": recorded.engine,
        "model": f"{model['num_hidden_layers']} layers, {model['num_attention_heads']} heads, "
        "random weights: the shape of one of 8 tensor-parallel ranks of Kimi K2.6",
        "measured_with": "ops.gpu.measure --part batches; seconds of a step while all answers of "
        "a batch were decoding, and of a whole prompt's prefill, as a client sees it",
        "nodes": recorded.nodes,
        # bf16 rows of the compressed KV and the rotary key, one a layer
        "kv_bytes_per_token": model["num_hidden_layers"]
        * (model["kv_lora_rank"] + model["qk_rope_head_dim"])
        * 2,
        "steps": [
            {"context": context, "batch": batch, "seconds": round(ms / 1e3, 6)}
            for (batch, context), ms in medians("batches", "ms", "batch", "context")
        ],
        "prefill": [
            {"context": context, "cached": 0, "seconds": round(seconds, 4)}
            for (context,), seconds in medians("prefills", "seconds", "context")
        ],
    }
    parse_curve(curve, recorded.name)
    return curve


@click.command()
@click.argument("measured", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--commit", required=True, help="What was measured.")
def main(measured: Sequence[Path], commit: str) -> None:
    """Write the package's curves from one measurement, or from several of the same commit."""
    document = merged([json.loads(path.read_text()) for path in measured])
    for recorded in RECORDED:
        path = CURVES / f"{recorded.name}.json"
        path.write_text(json.dumps(curve_of(recorded, document, commit), indent=1) + "\n")
        click.echo(f"written to {path}")


if __name__ == "__main__":
    main()
