"""Measure real SGLang on one GPU host: step times by context, prefill, profile, adaptive budget.

``python -m ops.gpu.measure --out FILE [--part NAME ...]``: numbers are
added to FILE after each measurement, so that a run that is cut short keeps what it has, and parts
may run one after another. `ops.gpu.report` makes rows and the plot of it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ops.gpu.adaptive import measure_adaptive
from ops.gpu.batches import measure_batches
from ops.gpu.client import Client, EngineError, Generation
from ops.gpu.metrics import counters, phase_means
from ops.gpu.pairs import HOME, LOGS, long
from ops.gpu.phases import read_steps, worst_disagreement
from ops.gpu.record import Record
from ops.gpu.servers import Method, serve
from ops.gpu.shares import gpu_events, profile, read_trace, shares
from ops.gpu.timing import random_prompt, time_steps

K = 1024
OUR_CONTEXTS = (K, 8 * K, 32 * K, 64 * K, 128 * K, 185_000)
STOCK_CONTEXTS = (K, 8 * K, 32 * K, 64 * K)
WIDTH_CONTEXTS = (K, 16 * K, 64 * K)
WIDTHS = (1, 8, 16, 32, 64)
EXTENDS = {32 * K: (16, 64, 128, 192, 256, 384, 512, 1024), 128 * K: (64, 256, 512, 1024, 2048)}
"""New tokens by the cached prefix, on both sides of where the two forms cost the same."""
EXTEND_FORMS = {
    "absorbed": {"LONGLEAF_ABSORBED_EXTEND_TOKENS": "4096"},
    "up-torch": {"LONGLEAF_ABSORBED_EXTEND_TOKENS": "0"},
}
"""Servers of the part `extend`: one for each way to attend from new tokens. `fa3` is not among
them: its library is 1.1 GB, too much for a host that packages must be carried to."""
BENCH_NODES = 9
BATCHES = (1, 2, 4, 8)
BATCH_POOL = 256 * K
"""Tokens of all prompts of a batch: about what a replica's KV pool holds of them."""


def measure_steps(
    record: Record, client: Client, server: str, contexts: Sequence[int], tokens: int
) -> None:
    """Step time at each context; prefill of one context goes on from the one before."""
    prompt = random_prompt(max(contexts))
    for context in contexts:
        first = client.generate(prompt[:context], 8, timeout=600)
        record.add(
            "prefill",
            server=server,
            context=context,
            cached=first.cached_tokens,
            seconds=round(first.first_token_seconds, 4),
        )
        timing = time_steps(client, prompt[:context], tokens)
        record.add("steps", server=server, context=context, **asdict(timing))


def measure_extend(
    record: Record, client: Client, server: str, context: int, repeats: int, new: int = 1
) -> None:
    """Time of new tokens after a cached prefix: in the scheduler, and as a client sees it."""
    prefix = random_prompt(context)
    client.generate(prefix, 1, timeout=600)
    inside, outside = [], []
    for number in range(repeats + 1):
        tail = [20 + number, *random_prompt(new - 1, 1000 * new + number)]
        answer = client.generate([*prefix, *tail], 1, timeout=600)
        if number:  # the first may compile
            inside.append(1e3 * _prefill_seconds(answer))
            outside.append(1e3 * answer.first_token_seconds)
    low, median, high = statistics.quantiles(inside, n=4)
    record.add(
        "extend1" if new == 1 else "extends",
        server=server,
        context=context,
        new=new,
        ms=round(median, 3),
        spread=[round(low, 3), round(high, 3)],
        client_ms=round(statistics.median(outside), 3),
        n=repeats,
    )


def _prefill_seconds(answer: Generation) -> float:
    """From the batch's start to its first token; as the client sees it where nothing says."""
    begin, end = (answer.meta.get(f"{name}_time") for name in ("forward_entry", "prefill_finished"))
    if begin is None or end is None:
        return answer.first_token_seconds
    return float(end) - float(begin)


PROFILED_STEPS = 32


def measure_profile(
    record: Record, client: Client, server: str, context: int, ranks: int = 1
) -> None:
    """Shares of GPU time at one context; phases as the profile and our metrics have them.

    Our metrics are read around the profiled answer, so that both saw the same steps, and around
    one without a profiler, which is what they say in service.
    """
    prompt = random_prompt(context)
    client.generate(prompt, 8, timeout=600)
    start = counters(client)
    client.generate(prompt, 128, timeout=600)
    plain = counters(client)
    tokens = PROFILED_STEPS + 4  # random weights: hardly a draft is accepted
    folder = HOME / "traces" / server
    traces = profile(client, folder, prompt, tokens, PROFILED_STEPS, ranks)
    beside = phase_means(plain, counters(client))
    events = read_trace(traces[0])
    record.add(
        "profile",
        server=server,
        context=context,
        phases_ms=phase_means(start, plain),
        phases_ms_profiled=beside,
        **asdict(shares(gpu_events(events))),
    )
    # Apart from the shares: a trace that cannot be read by phase still gives those.
    steps = read_steps(events)
    disagreement, phase = worst_disagreement(beside, steps.phases)
    record.add(
        "profiled_steps",
        server=server,
        context=context,
        disagreement=round(disagreement, 4),
        disagreeing_phase=phase,
        steps=asdict(steps),
    )


def part_ours(record: Record) -> None:
    """DDTREE at nine nodes, and decoding without speculation, on longleaf_mla."""
    ddtree = long(Method.DDTREE, "ddtree-9", (BENCH_NODES,))
    specs = [
        ddtree.variant("ddtree-9", engine={"sample_phases": 64}),
        # A profile sees every step, so the metrics beside it must.
        ddtree.variant("ddtree-9-phases", engine={"sample_phases": 1}, pool_tokens=80_000),
        long(Method.OURS_PLAIN, "ours-plain").variant("ours-plain", pool_tokens=80_000),
    ]
    with serve(specs, LOGS) as servers:
        client = servers["ddtree-9"].client
        measure_steps(record, client, "ddtree-9", OUR_CONTEXTS, 192)
        measure_extend(record, client, "ddtree-9", 32 * K, 9)
        measure_steps(record, servers["ours-plain"].client, "ours-plain", (K, 64 * K), 96)
        measure_profile(record, servers["ddtree-9-phases"].client, "ddtree-9", 64 * K)


def part_widths(record: Record) -> None:
    """DDTREE at every width that the adaptive budget chooses among."""
    specs = [
        long(Method.DDTREE, f"ddtree-{nodes}", (nodes,)).variant(
            f"ddtree-{nodes}", pool_tokens=80_000
        )
        for nodes in WIDTHS
    ]
    with serve(specs, LOGS) as servers:
        for name, server in servers.items():
            measure_steps(record, server.client, name, WIDTH_CONTEXTS, 128)


def part_batches(record: Record) -> None:
    """Prefills and steps of several answers at once, with DDTREE and without: `ops.gpu.curves`."""
    specs = [
        # More than are asked: SGLang may count a request that has just ended, and hold one back.
        spec.variant(name, pool_tokens=BATCH_POOL + 16 * K, running_requests=max(BATCHES) + 4)
        for name, spec in (
            (f"ddtree-{BENCH_NODES}", long(Method.DDTREE, "ddtree", (BENCH_NODES,))),
            ("ours-plain", long(Method.OURS_PLAIN)),
        )
    ]
    with serve(specs, LOGS) as servers:
        for name, server in servers.items():
            measure_batches(record, server.client, name, OUR_CONTEXTS, BATCHES, BATCH_POOL)


def part_stock(record: Record) -> None:
    """SGLang as it is: few steps, for they are slow."""
    specs = [
        long(Method.STOCK_DFLASH, "stock-dflash").variant("stock-dflash", pool_tokens=80_000),
        long(Method.STOCK_PLAIN, "stock-plain").variant("stock-plain", pool_tokens=80_000),
    ]
    with serve(specs, LOGS) as servers:
        client = servers["stock-dflash"].client
        measure_steps(record, client, "stock-dflash", STOCK_CONTEXTS, 32)
        measure_extend(record, client, "stock-dflash", 32 * K, 3)
        measure_steps(record, servers["stock-plain"].client, "stock-plain", (K, 8 * K, 32 * K), 64)


def part_extend(record: Record) -> None:
    """Absorbed against up-projected extends over each prefix."""
    specs = [
        long(Method.OURS_PLAIN, f"extend-{name}").variant(
            f"extend-{name}", pool_tokens=160_000, environment=environment
        )
        for name, environment in EXTEND_FORMS.items()
    ]
    with serve(specs, LOGS) as servers:
        for prefix, lengths in EXTENDS.items():
            for name, server in servers.items():
                for new in lengths:
                    measure_extend(record, server.client, name, prefix, 4, new)


PARTS: dict[str, Callable[[Record], None]] = {
    "ours": part_ours,
    "widths": part_widths,
    "batches": part_batches,
    "stock": part_stock,
    "adaptive": lambda record: measure_adaptive(record, WIDTHS, WIDTH_CONTEXTS),
    "extend": part_extend,
}


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)))
def main(out: Path, parts: tuple[str, ...]) -> None:
    """Measure the parts named, or all of them."""
    record = Record(out)
    failed = []
    for part in parts or tuple(PARTS):
        try:
            PARTS[part](record)
        except (EngineError, OSError, ValueError, KeyError) as error:
            # The next part does not need this one.
            failed.append(part)
            record.add("failed", part=part, error=f"{type(error).__name__}: {error}"[-2000:])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
