"""Predict a DDTREE step of Kimi K2.6 on 8 x RTX PRO 6000 (TP8), where it has not run.

``PYTHONPATH=kernels:service:. python -m ops.gpu.predict [--readme]``. A model, not a measurement;
every term is a range, best to worst, and the table says predicted.

    weights     bytes of a GPU's part of what every step reads: attention and dense projections,
                shared experts, gates, head; at 92 % of the nominal bandwidth
    experts     distinct experts that the nodes choose, each node eight of 384. Worst: every node
                draws alone, 384 (1 - (1 - 8/384)^n). Best: neighbours in a tree share half of
                what they choose, as if (n + 1) / 2 drew alone. 4-bit weights with a bf16 scale for
                32 of them; at 80 % (best) and 70 % (worst) of the bandwidth
    attention   61 x what kernel_bench.predict says for the kernel on sm_120a
    all-reduce  two a layer over PCIe: a latency (12 to 30 us), and 7/4 of the payload over 50 GB/s
    draft       six layers' weights, the head once more, twelve all-reduces, and the rows that the
                drafter attends to: its window on five layers, everything on the last
    other       launches that nothing hides, router, norms, sampling. Best: 1 ms. Worst: what makes
                the model give peers' published 91.5 tok/s of plain decoding at context 0, a step
                of 10.9 ms of which a stack other than ours is a part
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import click

from kernel_bench.cases import Problem
from kernel_bench.predict import BANDWIDTHS, RESULTS, Calibration, calibrate, predict

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"

CONTEXTS = (1024, 8192, 32_768, 65_536, 131_072, 185_000)
COMMIT_LENS = (3.7, 5.3)
"""Published accept lengths of the K2.5 DFlash drafter: chat, and maths and code."""
PEER_TOKENS_PER_SECOND = {0: 91.5, 131_072: 56.7}
"""Published by others on the same box: vLLM, fp8 KV, K2.6, without speculation."""

RANKS, LAYERS, HIDDEN, HEADS = 8, 61, 7168, 64
EXPERTS, CHOSEN, EXPERT_SIZE, DENSE_SIZE = 384, 8, 2048, 18_432
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 1536, 512, 128, 64, 128
VOCABULARY = 163_840
EXPERT_BYTES = 0.5 + 2 / 32
"""Of one weight of an expert: four bits, and a bf16 scale for a group of 32."""
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_HEAD, DRAFT_WINDOW = 6, 64, 8, 128, 2048
BLOCK = 8
PCIE_BYTES_PER_SECOND = 50e9
STEADY = 0.92


@dataclass(frozen=True, slots=True)
class Case:
    """One end of the ranges. latency: seconds of an all-reduce; other: seconds of a step."""

    bandwidth: float
    expert_efficiency: float
    shared_choice: bool
    latency: float
    other: float
    worst_attention: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Milliseconds of a step's parts."""

    weights: float
    experts: float
    attention: float
    all_reduce: float
    draft: float
    other: float

    @property
    def total(self) -> float:
        """Milliseconds of the step."""
        return (
            self.weights + self.experts + self.attention + self.all_reduce + self.draft + self.other
        )


def weight_bytes() -> float:
    """Bytes of a rank's weights that every step reads once, the routed experts aside."""
    replicated = HIDDEN * (Q_RANK + KV_RANK + ROPE)
    sharded = (
        Q_RANK * HEADS * (NOPE + ROPE) + KV_RANK * HEADS * (NOPE + VALUE) + HEADS * VALUE * HIDDEN
    ) / RANKS
    shared_expert = 3 * HIDDEN * EXPERT_SIZE / RANKS
    gate = HIDDEN * EXPERTS
    dense = 3 * HIDDEN * DENSE_SIZE / RANKS
    sparse_layers = LAYERS - 1
    weights = LAYERS * (replicated + sharded) + sparse_layers * (shared_expert + gate) + dense
    return 2 * (weights + head_weights())


def head_weights() -> float:
    """Weights of a rank's part of the head."""
    return HIDDEN * VOCABULARY / RANKS


def distinct_experts(nodes: float) -> float:
    """Expected experts of a layer that nodes choose, each eight at random."""
    missed: float = (1.0 - CHOSEN / EXPERTS) ** nodes
    return EXPERTS * (1.0 - missed)


def expert_bytes(experts: float) -> float:
    """Bytes of a rank's part of so many experts in every sparse layer."""
    one = 3 * HIDDEN * EXPERT_SIZE * EXPERT_BYTES / RANKS
    return (LAYERS - 1) * experts * one


def all_reduce_seconds(rows: int, count: int, latency: float) -> float:
    """Seconds of all-reduces of so many rows of bf16 hidden state: two phases over PCIe."""
    payload = rows * HIDDEN * 2
    traffic = 2 * (RANKS - 1) / RANKS * payload
    return count * (latency + traffic / PCIE_BYTES_PER_SECOND)


def draft_bytes(context: int) -> float:
    """Bytes of a rank that one draft of a block reads. Its MLP is taken as wide as the target's."""
    projections = HIDDEN * DRAFT_HEAD * (2 * DRAFT_HEADS + 2 * DRAFT_KV_HEADS)
    layer = projections + 3 * HIDDEN * DENSE_SIZE
    row = 2 * DRAFT_KV_HEADS * DRAFT_HEAD * 2 / RANKS
    rows = (DRAFT_LAYERS - 1) * min(context, DRAFT_WINDOW) + context
    return 2 * (DRAFT_LAYERS * layer / RANKS + head_weights()) + rows * row


def attention_seconds(context: int, nodes: int, case: Case, calibration: Calibration) -> float:
    """Seconds of verify attention in all layers."""
    found = predict(Problem((context,), nodes), case.bandwidth, calibration)
    return LAYERS * 1e-6 * (found.worst_us if case.worst_attention else found.best_us)


def step(context: int, nodes: int, case: Case, calibration: Calibration) -> Step:
    """Predict a step; of one node: plain decoding, which drafts nothing."""
    drawing = (nodes + 1) / 2 if case.shared_choice else nodes
    steady = case.bandwidth * STEADY
    draft = 0.0
    if nodes > 1:
        draft = draft_bytes(context) / steady
        draft += all_reduce_seconds(BLOCK, 2 * DRAFT_LAYERS, case.latency)
    experts = expert_bytes(distinct_experts(drawing))
    return Step(
        weights=1e3 * weight_bytes() / steady,
        experts=1e3 * experts / (case.bandwidth * case.expert_efficiency),
        attention=1e3 * attention_seconds(context, nodes, case, calibration),
        all_reduce=1e3 * all_reduce_seconds(nodes, 2 * LAYERS, case.latency),
        draft=1e3 * draft,
        other=1e3 * case.other,
    )


BEST = Case(BANDWIDTHS["Workstation"], 0.80, True, 12e-6, 1e-3, False)


def worst_case(calibration: Calibration) -> Case:
    """The case that gives peers' plain decoding at context 0."""
    case = Case(BANDWIDTHS["Server"], 0.70, False, 30e-6, 0.0, True)
    peer = 1e3 / PEER_TOKENS_PER_SECOND[0]
    without = step(0, 1, case, calibration)
    other = max(0.0, peer - (without.total - without.attention))
    return replace(case, other=1e-3 * other)


def calibration_at(context: int, values: dict[str, float | None]) -> Calibration:
    """What the H200 measured nearest below a context."""
    names = {0: "verify_n9_1k", 16_384: "verify_n9_16k", 65_536: "verify_n9_64k"}
    return calibrate(names[max(least for least in names if least <= context)], values)


def table(nodes: int, values: dict[str, float | None]) -> str:
    """The predictions as a Markdown table."""
    worst = worst_case(calibration_at(0, values))
    lines = [
        "| predicted, context | weights | experts | attention | all-reduce | draft | other "
        "| step, ms | tok/s at 3.7 a step | at 5.3 | peers, published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for context in CONTEXTS:
        found = calibration_at(context, values)
        low, high = (step(context, nodes, case, found) for case in (BEST, worst))
        parts = ("weights", "experts", "attention", "all_reduce", "draft", "other", "total")
        cells = [span(getattr(low, part), getattr(high, part)) for part in parts]
        cells += [span(1e3 * n / high.total, 1e3 * n / low.total, 0) for n in COMMIT_LENS]
        peer = PEER_TOKENS_PER_SECOND.get(context)
        cells.append("" if peer is None else f"{peer} tok/s")
        lines.append(f"| {context:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_values() -> dict[str, float | None]:
    """What the H200 measured of the kernels, by row."""
    rows = json.loads(RESULTS.read_text())["rows"]
    return {row["name"]: row["value"] for row in rows}


def span(low: float, high: float, digits: int = 1) -> str:
    """A range in words."""
    first, last = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return first if first == last else f"{first} to {last}"


@click.command()
@click.option("--nodes", default=9, show_default=True, help="Nodes of a step, the root included.")
@click.option("--readme", is_flag=True, help="Renew the table in ops/gpu/README.md too.")
def main(nodes: int, *, readme: bool) -> None:
    """Print the predicted steps of 8 x RTX PRO 6000."""
    text = table(nodes, measured_values())
    click.echo(text)
    if readme:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
