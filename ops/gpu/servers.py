"""Start and stop real SGLang servers: one configuration a server, several servers on one GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from longleaf.engine.process import ended_with_us
from ops.gpu.client import Client, EngineError

PLUGIN = "longleaf"
NO_MULTICAST: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
    "SGLANG_SKIP_P2P_CHECK": "1",
}
"""Several GPUs without NVLink multicast, which can put GPUs that others share out of service; and
the all-reduce that sgl_kernel has compiled, in place of one that would be compiled here."""
_FIRST_PORT = 12_000
_PORTS_APART = 100  # a server takes a few ports above its own


class Method(StrEnum):
    """How a server decodes."""

    DDTREE = "ddtree"
    OURS_PLAIN = "ours-plain"
    """longleaf_mla, no speculation."""
    STOCK_DFLASH = "stock-dflash"
    STOCK_PLAIN = "stock-plain"

    @property
    def speculates(self) -> bool:
        """Whether there is a drafter."""
        return self in (Method.DDTREE, Method.STOCK_DFLASH)

    @property
    def ours(self) -> bool:
        """Whether the plugin is loaded."""
        return self in (Method.DDTREE, Method.OURS_PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server. nodes: node counts of DDTREE's steps; one is fixed, empty takes the default.
    engine: more of the plugin's options.

    draft_window: rows of context that the drafter keeps; None: what its config says.
    dummy: random weights, from config.json alone. memory_share: SGLang counts servers that start at
    the same time against each other, so it must leave room for all; pool_tokens bounds the pool.
    bare: start SGLang itself with the plugin, not our launcher, which checks and warms up.
    plugins: SGLang's plugins that load; None: ours where the method needs it.
    flags, environment: added last.
    """

    name: str
    method: Method
    target: Path
    drafter: Path | None = None
    nodes: tuple[int, ...] = ()
    engine: Mapping[str, object] = field(default_factory=dict)
    draft_window: int | None = None
    context_length: int
    pool_tokens: int
    running_requests: int = 8
    chunk: int = 8192
    dummy: bool = False
    tensor_parallel: int = 1
    memory_share: float = 0.85
    bare: bool = False
    plugins: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def variant(self, name: str, **changes: object) -> Self:
        """Return the same server but for a name and what is given."""
        return replace(self, name=name, **changes)  # type: ignore[arg-type]

    def sglang_arguments(self, port: int) -> list[str]:
        """The arguments of sglang.launch_server."""
        options: dict[str, object] = {
            "model-path": self.target,
            "served-model-name": "longleaf",
            "host": "127.0.0.1",
            "port": port,
            "page-size": 1,
            "sampling-backend": "pytorch",
            "grammar-backend": "xgrammar",
            "mm-feature-transport": "cpu",
            "context-length": self.context_length,
            "max-total-tokens": self.pool_tokens,
            "max-running-requests": self.running_requests,
            "cuda-graph-max-bs-decode": self.running_requests,
            "chunked-prefill-size": self.chunk,
            "mem-fraction-static": self.memory_share,
            "tp-size": self.tensor_parallel,
            "attention-backend": "longleaf_mla" if self.method.ours else "triton",
        }
        if self.dummy:
            options["load-format"] = "dummy"
        if self.method.speculates:
            options |= self._speculation()
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        switches = ["--skip-server-warmup", "--enable-metrics", "--disable-prefill-cuda-graph"]
        switches.append("--sleep-on-idle")  # a server that waits leaves its core to the others
        if self.tensor_parallel > 1:
            # It would compile kernels that reach other GPUs by NVLink multicast.
            switches.append("--enforce-disable-flashinfer-allreduce-fusion")
        return [*words, *switches, *self.flags]

    def _speculation(self) -> dict[str, object]:
        if self.drafter is None:
            raise ValueError(f"server {self.name}: {self.method} needs a drafter")
        options: dict[str, object] = {
            "speculative-algorithm": "DDTREE" if self.method is Method.DDTREE else "DFLASH",
            "speculative-draft-model-path": self.drafter,
            "speculative-draft-attention-backend": "triton",
        }
        if self.dummy:
            options["speculative-draft-load-format"] = "dummy"
        if self.draft_window is not None:
            options["speculative-draft-window-size"] = self.draft_window
        return options

    def variables(self) -> dict[str, str]:
        """What is added to the environment: which plugins load, and the plugin's options."""
        plugins = self.plugins
        if plugins is None:
            plugins = (PLUGIN,) if self.method.ours else ("none",)
        variables = {"SGLANG_PLUGINS": ",".join(plugins)}
        options = dict(self.engine) | ({"nodes": list(self.nodes)} if self.nodes else {})
        if options:
            variables["LONGLEAF_ENGINE"] = json.dumps(options)
        if self.tensor_parallel > 1:
            variables |= NO_MULTICAST
            # Servers start together: the ranks of one need not find their GPUs equally full.
            variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        return variables | dict(self.environment)

    @property
    def launched(self) -> bool:
        """Whether our launcher starts it."""
        return self.method.ours and not self.bare

    def command(self, port: int, ready_file: Path) -> list[str]:
        """Our launcher where the plugin is in, else SGLang's own."""
        launcher = ["sglang.launch_server"]
        if self.launched:
            launcher = ["longleaf", "engine", "--ready-file", str(ready_file), "--"]
        return [sys.executable, "-W", "ignore", "-m", *launcher, *self.sglang_arguments(port)]


class Server:
    """A running server; the log holds what it printed. Leaving the context stops it."""

    def __init__(self, spec: ServerSpec, port: int, logs: Path) -> None:
        self.spec = spec
        self.client = Client(port)
        self.log = logs / f"{spec.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._ready_file = logs / f"{spec.name}.ready"
        self._ready_file.unlink(missing_ok=True)
        command = spec.command(port, self._ready_file)
        variables = spec.variables()
        with self.log.open("w") as out:
            out.write(f"{variables} {' '.join(command)}\n")
            out.flush()
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                start_new_session=True,
                # Whatever kills a measurement, its servers do not keep the GPUs.
                preexec_fn=ended_with_us(signal.SIGTERM),
            )
        self._begin = time.monotonic()

    def wait_ready(self, timeout: float) -> float:
        """Wait until the server answers; returns seconds since its start.

        Raises:
            EngineError: if it exits or is not ready in time, with the end of its log.
        """
        while time.monotonic() - self._begin < timeout:
            if self._process.poll() is not None:
                raise EngineError(
                    f"{self.spec.name} exited with {self._process.returncode}:\n{self.tail()}"
                )
            if self._answers():
                return time.monotonic() - self._begin
            time.sleep(0.25)
        raise EngineError(f"{self.spec.name} is not ready after {timeout:g} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    def processes(self) -> list[int]:
        """The server's process and all below it, parents first."""
        return [self._process.pid, *_descendants(self._process.pid)]

    def rank_process(self, rank: int) -> int:
        """The process of a tensor-parallel rank. EngineError if there is none."""
        title = f"scheduler_TP{rank}" if self.spec.tensor_parallel > 1 else "sglang::scheduler"
        for pid in self.processes():
            if title in command_of(pid):
                return pid
        raise EngineError(f"{self.spec.name} has no process of rank {rank}")

    def wait_end(self, timeout: float) -> int | None:
        """Wait until the server ends by itself; its exit status, None if it goes on."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the server and all its children, in whatever process group they are."""
        for pid in reversed(self.processes()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(timeout=30)

    def _answers(self) -> bool:
        """Our launcher is ready after its warm-up; SGLang itself answers before any."""
        if self.spec.launched and not self._ready_file.exists():
            return False
        try:
            self.client.get("/model_info", 3)
            self.client.get("/v1/loads", 3)
        except (OSError, EngineError):
            return False
        return True


@contextmanager
def serve(
    specs: Sequence[ServerSpec], logs: Path, *, timeout: float = 240.0, beside: int = 0
) -> Iterator[dict[str, Server]]:
    """Run servers side by side, started together; yields them by name once all are ready.

    beside: how many servers of this process run already.
    """
    with ExitStack() as stack:
        servers = {}
        for index, spec in enumerate(specs, beside):
            server = Server(spec, free_port(index), logs)
            stack.callback(server.stop)
            servers[spec.name] = server
        for server in servers.values():
            seconds = server.wait_ready(timeout)
            print(f"{server.spec.name} ready after {seconds:.1f} s", flush=True)
        yield servers


def free_port(index: int) -> int:
    """A port for the index-th server of this process; servers take ports above theirs too.

    All lie below 32,768: whoever polls a port among those that connections are given may be given
    that port, and then talks to itself and keeps the server from it.
    """
    return _FIRST_PORT + (os.getpid() % 16) * 1200 + _PORTS_APART * index


def command_of(pid: int) -> str:
    """A process's command line; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]
