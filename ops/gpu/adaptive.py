"""Decode speed of the adaptive budget against every fixed node count, on real SGLang."""

import json
import lzma
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from ops.bench.prompts import DATA, PromptSource
from ops.gpu.client import Client
from ops.gpu.pairs import HOME, LOGS, stretched
from ops.gpu.plugin_distribution import install
from ops.gpu.record import Record
from ops.gpu.servers import Method, serve
from ops.gpu.switch import FILE, PLUGIN, Switch
from ops.gpu.timing import time_steps

KINDS = ("predictable", "code", "prose")
PROMPTS_A_CELL = 2
ROUNDS = 5


def measure_adaptive(record: Record, widths: Sequence[int], contexts: Sequence[int]) -> None:
    """Decode speed of the adaptive budget against every fixed width, on the tiny trained pair.

    One server that switches between them, round after round. The budget is told what steps of each
    width cost here, as an operator would tell it.
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
        for (kind, context), texts in prompts.items():
            for name, answers in _speeds(client, switch, widths, costs, texts).items():
                record.add("adaptive", server=name, kind=kind, context=context, **answers)


def step_costs(
    client: Client, switch: Switch, widths: Sequence[int], prompts: Sequence[list[int]]
) -> list[tuple[int, int, float]]:
    """Milliseconds of a step by node count and context: the engine's option `step_ms`."""
    costs = []
    for prompt in prompts:
        for nodes in widths:
            switch.fix(nodes)
            client.generate(prompt, 32, timeout=600)
            costs.append((nodes, len(prompt), time_steps(client, prompt, 192).ms))
    return costs


def _speeds(
    client: Client,
    switch: Switch,
    widths: Sequence[int],
    costs: Sequence[tuple[int, int, float]],
    prompts: Sequence[list[int]],
) -> dict[str, dict[str, float]]:
    """Median tokens a second over the rounds, and commit_len, of every width and the adaptive."""
    names = [f"fixed-{nodes}" for nodes in widths] + ["adaptive"]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    tokens, steps = Counter[str](), Counter[str]()
    for round_ in range(ROUNDS + 1):
        for name, nodes in zip(names, [*widths, None], strict=True):
            if nodes is None:
                switch.adapt(costs)
            else:
                switch.fix(nodes)
            answers = [client.generate(prompt, 192, timeout=600) for prompt in prompts]
            if round_ == 0:  # prefills, and the adaptive budget learns the text
                continue
            decoded = sum(len(answer.tokens) - 1 for answer in answers)
            seconds = sum(a.events[-1].at - a.events[0].at for a in answers)
            speeds[name].append(decoded / seconds)
            tokens[name] += decoded
            steps[name] += sum(answer.steps for answer in answers)
    return {
        name: {
            "tokens_per_second": round(statistics.median(speeds[name]), 2),
            "slowest": round(min(speeds[name]), 2),
            "fastest": round(max(speeds[name]), 2),
            "commit_len": round(tokens[name] / max(1, steps[name]), 3),
        }
        for name in names
    }


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
