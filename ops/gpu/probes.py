"""The probes against real SGLang on one GPU: ``python -m ops.gpu.probes``.

Servers of 61 layers, with this project's verify and with SGLang's own, and the tiny trained pair;
beside them the GPU exporter. Leaves what each probe prints, writes and answers in LOGS/probes.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ops.gpu.pairs import LOGS, long, tiny
from ops.gpu.servers import Method, serve

_PROBE_SECONDS = 90.0


@contextmanager
def gpu_exporter(folder: Path, port: int) -> Iterator[str]:
    """``longleaf exporter gpu``, recording; gives the address of its metrics."""
    command = [
        *(sys.executable, "-m", "longleaf", "exporter", "gpu", "--port", str(port)),
        *("--interval", "0.25", "--record", str(folder / "recording.json")),
    ]
    with (folder / "exporter.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=30)


def probe(folder: Path, name: str, *arguments: str) -> int:
    """Run one probe; its exit code."""
    files = ("--json", str(folder / f"{name}.json"), "--html", str(folder / f"{name}.html"))
    command = [sys.executable, "-m", "longleaf", "probe", *arguments, *files]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"== {name}: not done in {_PROBE_SECONDS:g} s", flush=True)
        return -1
    print(f"== {name}: exit code {done.returncode}\n{done.stdout}{done.stderr[-2000:]}", flush=True)
    return done.returncode


@click.command()
@click.option("--context", default="16k", show_default=True, help="Of the GPU probe.")
@click.option("--seconds", default=4.0, show_default=True, help="Of each of its phases.")
def main(context: str, seconds: float) -> None:
    """Start everything, run every probe once."""
    folder = LOGS / "probes"
    folder.mkdir(parents=True, exist_ok=True)
    specs = [
        long(Method.DDTREE, "probe-ours", (9,)),
        long(Method.STOCK_DFLASH, "probe-stock").variant("probe-stock", pool_tokens=80_000),
        tiny(Method.DDTREE, "probe-tiny"),
    ]
    with serve(specs, LOGS) as servers, gpu_exporter(folder, 9470) as exporter:
        urls = {name: f"http://127.0.0.1:{server.client.port}" for name, server in servers.items()}
        gpu = ("--gpu-metrics-url", exporter, "--context", context, "--seconds", str(seconds))
        for name, tokens in (("ours", "192"), ("stock", "24")):
            url = urls[f"probe-{name}"]
            probe(folder, f"gpu-{name}", "gpu", "--url", url, *gpu, "--max-tokens", tokens)
        probe(
            folder,
            "step",
            *("step", "--url", urls["probe-ours"], "--against", urls["probe-stock"]),
            *("--contexts", f"1k,{context}", "--repeats", "2", "--max-tokens", "24"),
            *("--card", "h200"),
        )
        probe(
            folder,
            "commit",
            *("commit", "--url", urls["probe-tiny"], "--contexts", "160,1k,4k,16k"),
            *("--repeats", "2"),
        )


if __name__ == "__main__":
    main()
