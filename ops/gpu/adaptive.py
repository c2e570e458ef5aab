"""Decode speed of the adaptive budget against every fixed node count, on real SGLang."""

import json
import lzma
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from ops.bench.prompts import DATA, PromptSource
from ops.gpu.client import Client
from ops.gpu.metrics import steps_by_nodes
from ops.gpu.pairs import HOME, LOGS, stretched
from ops.gpu.plugin_distribution import install
from ops.gpu.record import Record
from ops.gpu.servers import Method, serve
from ops.gpu.switch import FILE, PLUGIN, Switch
from ops.gpu.timing import time_steps

KINDS = ("predictable", "code", "prose")
PROMPTS_A_CELL = 2
ROUNDS = 4
COST_ROUNDS = 5
TOKENS = 160


def measure_adaptive(record: Record, widths: Sequence[int], contexts: Sequence[int]) -> None:
    """Decode speed of the adaptive budget against every fixed width, on the tiny trained pair.

    One server that switches between them, round after round. The budget is told what steps of each
    width cost here, as an operator would tell it. Speeds are compared at the same step times: a
    width takes as long whatever the text, so its time at a context is one over all kinds, and the
    adaptive budget pays for each of its steps what a fixed one of that width takes.
    """
    switch = Switch(HOME / "switch.json")
    folder = install(HOME / "switch-plugin", PLUGIN, "ops.gpu.switch:register")
    spec = stretched(Method.DDTREE, "switched").variant(
        "switched",
        nodes=tuple(widths),
        pool_tokens=300_000,
        bare=True,
        plugins=(PLUGIN,),
        environment={
            FILE: str(switch.path),
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)]),
        },
    )
    tokenizer = Tokenizer.load(DEFAULT_MODELS / "tiny-target")
    with serve([spec], LOGS) as servers:
        client = servers["switched"].client
        prompts = {
            (kind, context): list(islice(_texts(tokenizer, kind, context), PROMPTS_A_CELL))
            for kind in KINDS
            for context in contexts
        }
        costs = step_costs(
            client, switch, widths, [prompts["predictable", at][0] for at in contexts]
        )
        record.add("step_costs", step_ms=costs)
        cells = {
            cell: _measure(client, switch, widths, costs, texts) for cell, texts in prompts.items()
        }
        for context in contexts:
            here = {kind: cells[kind, context] for kind in KINDS}
            times = {
                nodes: _quiet(
                    [ms for cell in here.values() for ms in cell[f"fixed-{nodes}"].step_ms()]
                )
                for nodes in widths
            }
            record.add("fixed_step_ms", context=context, milliseconds=times)
            for kind, cell in here.items():
                for name, decoding in cell.items():
                    record.add(
                        "adaptive",
                        server=name,
                        kind=kind,
                        context=context,
                        **decoding.figures(times),
                    )


def step_costs(
    client: Client, switch: Switch, widths: Sequence[int], prompts: Sequence[list[int]]
) -> list[tuple[int, int, float]]:
    """Milliseconds of a step by node count and context: the engine's option `step_ms`."""
    costs = []
    for prompt in prompts:
        client.generate(prompt, 1, timeout=600)
        times: dict[int, list[float]] = {nodes: [] for nodes in widths}
        for _ in range(COST_ROUNDS):
            for nodes in widths:
                switch.fix(nodes)
                times[nodes].append(time_steps(client, prompt, 96).ms)
        costs += [(nodes, len(prompt), _quiet(times[nodes])) for nodes in widths]
    return costs


@dataclass(slots=True)
class Decoding:
    """Answers of one cell by one budget. seconds, steps: of each answer; tokens: of all of them.

    nodes: its steps by node count.
    """

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tokens: int = 0
    nodes: Counter[int] = field(default_factory=Counter)

    def step_ms(self) -> list[float]:
        """Milliseconds of a step, answer by answer."""
        return [1e3 * s / n for s, n in zip(self.seconds, self.steps, strict=True)]

    def figures(self, step_ms: Mapping[int, float]) -> dict[str, object]:
        """What is recorded; tokens_per_second is by these times of its steps, wall as it came."""
        commit_len = self.tokens / sum(self.steps)
        counted = sum(self.nodes.values())
        mean_ms = sum(step_ms[nodes] * n for nodes, n in self.nodes.items()) / counted
        return {
            "tokens_per_second": round(1e3 * commit_len / mean_ms, 2),
            "wall_tokens_per_second": round(self.tokens / sum(self.seconds), 2),
            "commit_len": round(commit_len, 3),
            "steps_by_nodes": {nodes: n for nodes, n in sorted(self.nodes.items()) if n},
        }


def _measure(
    client: Client,
    switch: Switch,
    widths: Sequence[int],
    costs: Sequence[tuple[int, int, float]],
    prompts: Sequence[list[int]],
) -> dict[str, Decoding]:
    """Every width and the adaptive budget on the same prompts, round after round."""
    found = {f"fixed-{nodes}": Decoding() for nodes in widths} | {"adaptive": Decoding()}
    for round_ in range(ROUNDS + 1):
        for decoding, nodes in zip(found.values(), [*widths, None], strict=True):
            if nodes is None:
                switch.adapt(costs)
            else:
                switch.fix(nodes)
            before = steps_by_nodes(client)
            answers = [client.generate(prompt, TOKENS, timeout=600) for prompt in prompts]
            if round_ == 0:  # prefills, and the adaptive budget learns the text
                continue
            decoding.seconds += [answer.events[-1].at - answer.events[0].at for answer in answers]
            decoding.steps += [answer.steps for answer in answers]
            decoding.tokens += sum(len(answer.tokens) - 1 for answer in answers)
            decoding.nodes += steps_by_nodes(client) - before
        print(f"adaptive: round {round_} of {ROUNDS}", flush=True)
    return found


def _quiet(times: Sequence[float]) -> float:
    """The lower quartile: the host, which bounds a step of so small a model, has slower spells."""
    return round(statistics.quantiles(times, n=4)[0], 3)


def _texts(tokenizer: Tokenizer, kind: str, length: int) -> Iterator[list[int]]:
    """Prompts of one kind, of any length: sources follow one another until it is reached."""
    if kind == "predictable":
        for prompt in PromptSource(tokenizer).predictable(length, 1):
            yield prompt.tokens.tolist()
        return
    data = json.loads(lzma.decompress(DATA.read_bytes()))
    texts = [tokenizer.encode(item["text"]) for item in data[kind]]
    for first in range(len(texts)):
        tokens: list[int] = []
        while len(tokens) < length:
            for text in texts[first:] + texts[:first]:
                tokens += text
        # The end is where the answer goes on from: another place in the text for each prompt.
        yield tokens[-length:] if first % 2 else tokens[:length]
