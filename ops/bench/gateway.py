"""Measure the gateway beside its peers: CPU a chunk and a request, first bytes, many streams.

Run as ``python -m ops.bench.gateway``; prints a table and writes ops/results/gateway.json. Every
gateway stands before the same replicas and has the same clients; it has one core, they another.
CPU is that of the gateway's whole process tree. Passes are interleaved and medians are taken:
only ratios of one run mean anything. Ours has all its features on: keys, admission with a
tokenizer, routing by expected cost, metrics, a log line a request.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import click
import uvloop

from ops.bench.gateway_backend import MODEL
from ops.bench.gateway_load import Answer, ask_many, ask_once, first_bytes, request, stream_many
from ops.bench.gateway_peers import (
    BACKEND_PORTS,
    METRICS_PORT,
    PORT,
    TOKENIZER,
    Target,
    cpu_seconds,
    new_key,
    probing_livez,
    resident_bytes,
    running,
    running_backend,
    targets,
)
from ops.bench.leftovers import check_free, unwind_on_sigterm
from ops.bench.results import RESULTS_DIR, Row, format_table, write_results

_GATEWAY_CORE, _OTHER_CORE = 0, 1
_STREAMS = 50
_CHUNKS = 200
_GAP_MS = 10
_START_SECONDS = 120.0
_LONG_TOKENS = 200_000
_LONG_PROMPTS = 50
_MANY = 1_000
_MANY_CHUNKS = 12

Samples = dict[str, dict[str, list[float]]]
"""Measured values by what was measured and by gateway."""


class Bench:
    """One run. ``scale`` shortens it, for a trial."""

    def __init__(self, folder: Path, passes: int, scale: float) -> None:
        self._folder = folder
        self._passes = passes
        self._scale = scale
        self._key = new_key()
        self.targets = targets(folder, self._key)
        self.samples: Samples = defaultdict(lambda: defaultdict(list))

    async def run(self) -> None:
        """Measure everything that is installed."""
        present = [one for one in self.targets.values() if one.missing is None]
        for number in range(self._passes):
            for target in present:
                click.echo(f"pass {number + 1} of {self._passes}: {target.name}", err=True)
                async with self._started(target) as pid:
                    await self._costs(target.name, pid)
            direct = await self._first_bytes(BACKEND_PORTS[0])
            self.samples["first_byte"]["direct"] += direct
        async with self._started(self.targets["longleaf"]) as pid:
            click.echo(f"{_MANY} streams", err=True)
            await self._many_streams(pid)
            click.echo(f"{_LONG_PROMPTS} long prompts", err=True)
            await self._long_prompts()

    @asynccontextmanager
    async def _started(self, target: Target) -> AsyncIterator[int]:
        with running(target, self._folder, _GATEWAY_CORE) as pid:
            deadline = time.monotonic() + _START_SECONDS
            while (await ask_once(PORT, self._wire("", stream=False), 5.0)).status != 200:
                if time.monotonic() > deadline:
                    log = (self._folder / f"{target.name}.log").read_text(errors="replace")
                    raise click.ClickException(f"{target.name} does not answer: {log[-2000:]}")
                await asyncio.sleep(0.25)
            yield pid

    def _wire(self, text: str, *, stream: bool, port: int = PORT) -> bytes:
        return request(port, MODEL, text, stream=stream, key=self._key, extra={})

    def _count(self, full: int, least: int) -> int:
        return max(least, int(full * self._scale))

    async def _costs(self, name: str, pid: int) -> None:
        """CPU a request and a chunk, after a warm-up."""
        total = self._count(300 if name == "litellm" else 3_000, 100)
        chunks = self._count(_CHUNKS, 40)
        whole = self._wire("", stream=False)
        paced = self._wire(f"[chunks={chunks} gap_ms={_GAP_MS}]", stream=True)
        await ask_many(PORT, whole, total // 10, 8)
        await stream_many(PORT, self._wire("[chunks=20 gap_ms=5]", stream=True), 10, 0.1)
        await asyncio.sleep(0.5)
        before = cpu_seconds(pid)
        bad = await ask_many(PORT, whole, total, 8)
        self.samples["request_us"][name].append((cpu_seconds(pid) - before) / total * 1e6)
        before = cpu_seconds(pid)
        answers = await stream_many(PORT, paced, _STREAMS, _GAP_MS / 1e3)
        events = sum(answer.events for answer in answers)
        self.samples["chunk_us"][name].append((cpu_seconds(pid) - before) / events * 1e6)
        bad += sum(not _served(answer, chunks) for answer in answers)
        self.samples["bad"][name].append(bad)
        self.samples["first_byte"][name] += await self._first_bytes(PORT)

    async def _first_bytes(self, port: int) -> list[float]:
        wire = self._wire("[chunks=2 gap_ms=5]", stream=True, port=port)
        await first_bytes(port, wire, 20, 1)
        return await first_bytes(port, wire, 20, self._count(20, 3))

    async def _many_streams(self, pid: int) -> None:
        """A thousand open streams: none dropped, little memory, the process still answers."""
        wire = self._wire(f"[chunks={_MANY_CHUNKS} gap_ms=1000]", stream=True)
        with probing_livez(PORT, _OTHER_CORE) as latencies:
            streams = asyncio.create_task(stream_many(PORT, wire, _MANY, 4.0))
            peak = 0
            while not streams.done():
                peak = max(peak, resident_bytes(pid))
                await asyncio.sleep(0.1)
            answers = await streams
        dropped = sum(not _served(answer, _MANY_CHUNKS) for answer in answers)
        self.samples["streams_dropped"]["longleaf"].append(dropped)
        self.samples["streams_rss_mb"]["longleaf"].append(peak / 1e6)
        self.samples["streams_livez_ms"]["longleaf"] += latencies

    async def _long_prompts(self) -> None:
        """Prompts of 200k tokens, all at once, each one other, counted exactly."""
        wires = [self._long_wire(number) for number in range(_LONG_PROMPTS)]
        with probing_livez(PORT, _OTHER_CORE) as latencies:
            answers = await asyncio.gather(*(ask_once(PORT, wire) for wire in wires))
        unanswered = sum(not (answer.whole and _reasoned(answer)) for answer in answers)
        self.samples["long_unanswered"]["longleaf"].append(unanswered)
        self.samples["long_livez_ms"]["longleaf"] += latencies
        seconds = max(answer.ended - answer.sent for answer in answers)
        self.samples["long_seconds"]["longleaf"].append(seconds)

    def _long_wire(self, number: int) -> bytes:
        text = f"{number} " + _LONG_TEXT
        return self._wire(text, stream=False)


def _long_text() -> str:
    """Plain words with 200k tokens, in about a megabyte."""
    from tokenizers import Tokenizer

    words = "a quick brown fox jumped over many lazy dogs while nobody was looking at them " * 40
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokens = len(tokenizer.encode(words).ids)
    return words * (_LONG_TOKENS // tokens)


_LONG_TEXT = _long_text()


def _served(answer: Answer, chunks: int) -> bool:
    return answer.status == 200 and answer.whole and answer.events >= chunks


def _reasoned(answer: Answer) -> bool:
    """Whether it is an answer, or a refusal that names a reason."""
    if answer.status == 200:
        return True
    try:
        return bool(json.loads(b"".join(answer.body))["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return False


def rows(samples: Samples, missing: Mapping[str, str]) -> list[Row]:
    """The rows of the results file."""
    made = [
        _ratio(samples, missing, "cpu_chunk_vs_litellm", "chunk_us", "litellm", 1 / 12, None),
        _ratio(samples, missing, "cpu_request_vs_litellm", "request_us", "litellm", 1 / 20, None),
        _ratio(
            samples, missing, "cpu_chunk_vs_sglang_router", "chunk_us", "sglang-router", 2.5, 1.5
        ),
        _ratio(samples, missing, "cpu_request_vs_smg", "request_us", "smg", 3.0, 2.0),
    ]
    direct = statistics.median(samples["first_byte"]["direct"])
    first = samples["first_byte"]["longleaf"]
    for share, bar, stretch in ((0.5, 3.0, 1.0), (0.99, 10.0, 4.0)):
        added = (_quantile(first, share) - direct) * 1e3
        name = f"ttfb_added_p{share * 100:.0f}_ms"
        made.append(Row(name, added, "ms", bar, "lower", len(first), stretch=stretch))
    for name, what, unit, bar in (
        ("streams_1000_dropped", "streams_dropped", "streams", 0.0),
        ("streams_1000_rss_mb", "streams_rss_mb", "MB", 300.0),
        ("streams_1000_livez_max_ms", "streams_livez_ms", "ms", 100.0),
        ("long_prompts_livez_max_ms", "long_livez_ms", "ms", 100.0),
        ("long_prompts_unanswered", "long_unanswered", "prompts", 0.0),
    ):
        values = samples[what]["longleaf"]
        made.append(Row(name, max(values), unit, bar, "lower", len(values)))
    made.append(Row("long_prompts_seconds", max(samples["long_seconds"]["longleaf"]), "s"))
    for what in ("chunk_us", "request_us"):
        for name, values in samples[what].items():
            spread = (_quantile(values, 0.25), _quantile(values, 0.75))
            value = statistics.median(values)
            row = Row(f"{name}_{what}", value, "us", better="lower", n=len(values), spread=spread)
            made.append(row)
    for name, values in samples["first_byte"].items():
        value = statistics.median(values) * 1e3
        made.append(Row(f"{name}_first_byte_ms", value, "ms", better="lower", n=len(values)))
    for name, values in samples["bad"].items():
        made.append(Row(f"{name}_failed", sum(values), "answers", better="lower", n=len(values)))
    return made


def _ratio(
    samples: Samples,
    missing: Mapping[str, str],
    name: str,
    what: str,
    peer: str,
    bar: float,
    stretch: float | None,
) -> Row:
    ours, theirs = samples[what]["longleaf"], samples[what].get(peer, [])
    if not theirs:
        why = missing.get(peer, "not measured")
        return Row(name, None, "ratio", bar, "lower", why=why, stretch=stretch)
    value = statistics.median(ours) / statistics.median(theirs)
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    spread = (_quantile(ratios, 0.25), _quantile(ratios, 0.75))
    return Row(name, value, "ratio", bar, "lower", len(ours), spread, stretch=stretch)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@click.command()
@click.option("--passes", default=5, show_default=True, help="Interleaved passes.")
@click.option("--scale", default=1.0, show_default=True, help="Less than 1: a short trial.")
@click.option("--only", multiple=True, help="Measure these peers alone beside ours; repeat.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS_DIR, show_default=True)
def main(passes: int, scale: float, only: tuple[str, ...], out: Path) -> None:
    """Measure the gateway beside its peers."""
    unwind_on_sigterm()
    check_free((*BACKEND_PORTS, PORT, METRICS_PORT))
    os.sched_setaffinity(0, {_OTHER_CORE})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(folder, passes, scale)
        missing = {key: one.missing for key, one in bench.targets.items() if one.missing}
        for key in list(bench.targets):
            if only and key != "longleaf" and key not in only:
                missing[key] = "left out of this run"
                del bench.targets[key]
        for why in missing.values():
            click.echo(why, err=True)
        with running_backend(folder, _OTHER_CORE):
            uvloop.run(bench.run())
    made = rows(bench.samples, missing)
    command = f"make bench-gateway BENCH_ARGS='--passes {passes} --scale {scale:g}'"
    path = write_results("gateway", command, made, directory=out)
    click.echo(format_table(made))
    click.echo(f"written: {path}")


if __name__ == "__main__":
    main()
