"""Check DDTREE under tensor parallelism on real GPUs: ``python -m ops.gpu.tp_check --tp N``.

Parts, each written to the file as soon as it is known:

- ranks: the tiny trained pair on N ranks. Trees, paths and tokens of every rank, step by step,
  greedy and sampled; greedy answers against one GPU without speculation.
- steps: 61 layers. Step times by context on N ranks, on one GPU with the same heads a rank, and
  without speculation; all-reduce time and idle time from a profile.
- kill: one rank killed while a stream runs: what the client sees, how the launcher ends, what is
  left behind.

`ops.gpu.tp_report` makes rows of it.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import click

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from ops.bench.commit import lossless_prompts
from ops.bench.prompts import PromptSource
from ops.gpu import ranks
from ops.gpu.client import Client, EngineError, ask_all
from ops.gpu.judge import partings, wrong
from ops.gpu.measure import BENCH_NODES, K, measure_profile, measure_steps
from ops.gpu.pairs import HOME, LOGS, long, tiny
from ops.gpu.plugin_distribution import install
from ops.gpu.record import Record
from ops.gpu.servers import Method, Server, ServerSpec, command_of, free_port
from ops.gpu.timing import random_prompt

CONTEXTS = (K, 32 * K, 64 * K, 128 * K)
PROFILED_CONTEXT = 64 * K
POOL_TOKENS = 140_000
LEAST_STEPS = 500
TOKENS = 192
PARTS = ("ranks", "steps", "kill")
LEFT_MIB = 300
"""GPU memory above what was used before anything started that still counts as given back."""


def specs(tp: int, heads: int, parts: Sequence[str], nccl: bool) -> dict[str, ServerSpec]:
    """The servers of these parts, by role."""
    flags = ("--disable-custom-all-reduce",) if nccl and tp > 1 else ()
    found: dict[str, ServerSpec] = {}
    if "ranks" in parts:
        folder = install(HOME / "ranks-plugin", ranks.PLUGIN, "ops.gpu.ranks:register")
        found["reference"] = tiny(Method.STOCK_PLAIN, "tp-reference")
        found["ranks"] = tiny(Method.DDTREE, f"tiny-tp{tp}", (16,)).variant(
            f"tiny-tp{tp}",
            bare=True,
            plugins=(ranks.PLUGIN,),
            tensor_parallel=tp,
            flags=flags,
            environment={
                ranks.FOLDER: str(HOME / "ranks" / f"tiny-tp{tp}"),
                "PYTHONPATH": _path_with(folder),
            },
        )
    if "steps" in parts or "kill" in parts:
        found["many"] = _long(Method.DDTREE, f"ddtree-tp{tp}", heads, tp, flags)
    if "steps" in parts:
        found["plain"] = _long(Method.OURS_PLAIN, f"plain-tp{tp}", heads, tp, flags)
        found["one"] = _long(Method.DDTREE, f"ddtree-one-of-{tp}", heads // tp, 1, ())
    return found


def _long(method: Method, name: str, heads: int, ranks_: int, flags: tuple[str, ...]) -> ServerSpec:
    nodes = (BENCH_NODES,) if method is Method.DDTREE else ()
    made = long(method, name, nodes, heads=heads, ranks=ranks_)
    engine = {"sample_phases": 4} if method is Method.DDTREE else {}
    return made.variant(name, pool_tokens=POOL_TOKENS, flags=flags, engine=engine)


def _path_with(folder: Path) -> str:
    import os

    return os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])


def part_ranks(record: Record, tp: int, client: Client, reference: Client) -> None:
    """Compare what the ranks decide, greedy and sampled, and the greedy answers."""
    folder = HOME / "ranks" / f"tiny-tp{tp}"
    source = PromptSource(Tokenizer.load(DEFAULT_MODELS / "tiny-target"))
    prompts = [prompt.tokens.tolist() for prompt in lossless_prompts(source)]
    written = 0
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        while ranks.steps_written(folder) - written < LEAST_STEPS:
            answers = ask_all(client, prompts, TOKENS, at_once=4, temperature=temperature)
        found = ranks.compare(folder, tp, written)
        written = ranks.steps_written(folder)
        record.add("ranks", kind=kind, **asdict(found))
        if kind == "greedy":
            expected = ask_all(reference, prompts, TOKENS, at_once=4, top_logprobs=3)
            parted = partings(answers, expected)
            record.add(
                "answers",
                compared=len(prompts),
                parted=len(parted),
                wrong=[asdict(item) for item in wrong(parted)],
            )


def part_steps(record: Record, tp: int, servers: Mapping[str, Server]) -> None:
    """Step times by context of each server, and the profile of the ranks."""
    many = servers["many"]
    for role, tokens in (("many", 96), ("one", 96), ("plain", 48)):
        server = servers[role]
        measure_steps(record, server.client, role, CONTEXTS, tokens)
    measure_profile(record, many.client, "many", PROFILED_CONTEXT, tp)


def part_kill(record: Record, server: Server, gateway_port: int, before: Sequence[int]) -> None:
    """Kill the last rank while streams run, one of them through the gateway."""
    port = server.client.port
    outcome: dict[str, str] = {}
    with gateway(port, gateway_port) as reachable:
        streams = [Thread(target=_direct, args=(server.client, outcome))]
        if reachable:
            streams.append(Thread(target=_through, args=(gateway_port, outcome)))
        else:
            outcome["gateway"] = "not run: the gateway did not start on this host"
        for stream in streams:
            stream.start()
        time.sleep(1.5)
        processes = server.processes()
        named = {pid: command_of(pid) for pid in processes}
        victim = server.rank_process(server.spec.tensor_parallel - 1)
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        status = server.wait_end(90)
        seconds = time.monotonic() - begin
        for stream in streams:
            stream.join(30)
    left = [pid for pid in processes if named[pid] and command_of(pid) == named[pid]]
    said = [line for line in server.tail(80).splitlines() if line.startswith("longleaf engine:")]
    memory = _memory_after(before)
    record.add(
        "kill",
        client=outcome.get("direct", "no end"),
        gateway=outcome.get("gateway", "no end"),
        launcher_status=status,
        launcher_said=said[-1] if said else "",
        seconds=round(seconds, 2),
        processes_left=len(left),
        mib_left=memory,
    )


def _direct(client: Client, outcome: dict[str, str]) -> None:
    try:
        client.generate(random_prompt(256), 4000, timeout=120)
        outcome["direct"] = "an answer as if nothing had happened"
    except (EngineError, OSError) as error:
        outcome["direct"] = f"{type(error).__name__}: {error}"[:200]


def _through(port: int, outcome: dict[str, str]) -> None:
    body = {
        "model": "longleaf",
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    command = ["curl", "-sN", "--max-time", "120", f"http://127.0.0.1:{port}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    errors = [event for event in events if '"error"' in event]
    missing = f"{len(events)} events, no error event: {text[-200:]}"
    outcome["gateway"] = errors[0][:300] if errors else missing


@contextmanager
def gateway(replica: int, port: int) -> Iterator[bool]:
    """Run our gateway before a replica; yields whether it answers."""
    command = [sys.executable, "-m", "longleaf", "gateway", "--port", str(port)]
    command += ["--metrics-port", str(port + 1), "--replica", f"http://127.0.0.1:{replica}"]
    with (LOGS / "gateway.log").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield _comes_up(process, Client(port), 20.0)
    finally:
        process.kill()
        process.wait()


def _comes_up(process: "subprocess.Popen[bytes]", client: Client, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with suppress(EngineError, OSError):
            client.get("/v1/models", 2)
            return True
        time.sleep(0.25)
    return False


def memory_used() -> list[int]:
    """MiB in use on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]


def _memory_after(before: Sequence[int]) -> list[int]:
    """MiB above what was in use before, once the driver has given it back or 20 s later."""
    end = time.monotonic() + 20
    while True:
        left = [now - then for now, then in zip(memory_used(), before, strict=True)]
        if max(left) <= LEFT_MIB or time.monotonic() > end:
            return left
        time.sleep(0.5)


@contextmanager
def beside(command: str | None) -> Iterator[None]:
    """Run a command while the steps are measured: an exporter of GPU counters, for one."""
    if command is None:
        yield
        return
    with (LOGS / "beside.log").open("w") as out:
        process = subprocess.Popen(shlex.split(command), stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@click.command()
@click.option("--tp", required=True, type=click.IntRange(1, 8), help="Ranks, one a GPU.")
@click.option("--heads", default=64, show_default=True, help="Heads of the 61-layer model.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS))
@click.option("--nccl", is_flag=True, help="Reduce by NCCL alone.")
@click.option("--beside", "command", help="A command to run beside the steps; see logs/beside.log.")
def main(
    tp: int, heads: int, out: Path, parts: tuple[str, ...], *, nccl: bool, command: str | None
) -> None:
    """Run the parts named, or all; their servers start together."""
    wanted = parts or PARTS
    LOGS.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(HOME / "ranks", ignore_errors=True)
    before = memory_used()
    record = Record(out)
    record.document |= {"tp": tp, "heads": heads, "gpus": len(before)}
    failed: list[str] = []
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for index, (role, spec) in enumerate(specs(tp, heads, wanted, nccl).items()):
            servers[role] = Server(spec, free_port(index), LOGS)
            stack.callback(servers[role].stop)
        for part in wanted:
            try:
                _run(part, record, tp, servers, command, before)
            except (EngineError, OSError, ValueError, TimeoutError) as error:
                # What other parts can show is not lost with this one.
                failed.append(part)
                record.add("failed", part=part, error=str(error)[-2000:])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _run(
    part: str,
    record: Record,
    tp: int,
    servers: Mapping[str, Server],
    command: str | None,
    before: Sequence[int],
) -> None:
    needed = {"ranks": ("ranks", "reference"), "steps": ("many", "plain", "one"), "kill": ("many",)}
    for role in needed[part]:
        seconds = servers[role].wait_ready(300)
        print(f"{servers[role].spec.name} ready after {seconds:.0f} s", flush=True)
    if part == "ranks":
        part_ranks(record, tp, servers["ranks"].client, servers["reference"].client)
    elif part == "steps":
        with beside(command):
            part_steps(record, tp, servers)
    else:
        for role, server in servers.items():
            if role != "many":
                server.stop()
        part_kill(record, servers["many"], free_port(len(servers)), before)


if __name__ == "__main__":
    main()
