"""The servers of these tests by name, and how tests ask them."""

import json
import lzma
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ops.gpu import ranks
from ops.gpu.client import Client, Generation, ask_all
from ops.gpu.pairs import HOME, stretched, tiny
from ops.gpu.plugin_distribution import install
from ops.gpu.reference import DATA, NODES
from ops.gpu.servers import Method, Server, ServerSpec

__all__ = ["FAULTS", "SPECS", "Fleet", "ask_all", "commit_len", "embedded", "embedded_commit_len"]

FAULTS = (
    "causal-mask",
    "positions-by-node",
    "stale-padding",
    "draft-not-cropped",
    "window-ignored",
)
"""Faults that tests/gpu/engine/faulty plants on one GPU; "rank-different-trees" needs two."""

FP8 = ("--kv-cache-dtype", "fp8_e4m3")
PADDED_BATCH = 8
"""The only graph size of servers that must pad: smaller batches leave padding requests."""


def retracting(every: int) -> dict[str, str]:
    """The environment in which SGLang retracts a request every so many steps."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(every)}


def ranks_folder(name: str) -> Path:
    """Where the ranks of a server with a planted plugin write what they decide."""
    return HOME / "ranks" / name


def _ddtree(name: str, **changes: object) -> ServerSpec:
    return tiny(Method.DDTREE, name, nodes=(NODES,)).variant(name, **changes)


def _planted(name: str, fault: str, **changes: object) -> ServerSpec:
    """A server whose plugin is ours with a fault in it; SGLang itself starts it."""
    folder = install(HOME / "faulty", "longleaf_faulty", "tests.gpu.engine.faulty:register")
    return _ddtree(
        name,
        bare=True,
        plugins=("longleaf_faulty",),
        environment={
            "LONGLEAF_TEST_FAULT": fault,
            ranks.FOLDER: str(ranks_folder(name)),
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)]),
        },
        flags=("--cuda-graph-bs-decode", "1", str(PADDED_BATCH)),
        **changes,
    )


SPECS: Mapping[str, Callable[[], ServerSpec]] = {
    "plain": lambda: tiny(Method.STOCK_PLAIN, "plain"),
    "chain": lambda: tiny(Method.STOCK_DFLASH, "chain"),
    # A tiny model fills the tokens that a schema leaves it with spaces if it may.
    "ddtree": lambda: _ddtree("ddtree", flags=("--constrained-json-disable-any-whitespace",)),
    "adaptive": lambda: tiny(Method.DDTREE, "adaptive"),
    # SGLang's own decoding of fp8 KV rounds the softmax's probabilities to fp8 as well.
    "plain-fp8": lambda: tiny(Method.OURS_PLAIN).variant("plain-fp8", flags=FP8),
    "ddtree-fp8": lambda: _ddtree("ddtree-fp8", flags=FP8),
    "ddtree-padded": lambda: _planted("ddtree-padded", "none"),
    "ddtree-retracting": lambda: _ddtree(
        "ddtree-retracting",
        environment=retracting(20),
    ),
    "soak": lambda: stretched(Method.DDTREE, "soak", (NODES,)).variant(
        "soak", pool_tokens=150_000, running_requests=16, environment=retracting(200)
    ),
    "ddtree-tp2": lambda: _planted("ddtree-tp2", "none", tensor_parallel=2),
    "ddtree-tp2-faulty": lambda: _planted(
        "ddtree-tp2-faulty", "rank-different-trees", tensor_parallel=2
    ),
    **{f"faulty-{fault}": partial(_planted, f"faulty-{fault}", fault) for fault in FAULTS},
}


def gpus_needed(name: str) -> int:
    """GPUs of a server."""
    return SPECS[name]().tensor_parallel


class Fleet:
    """Running servers by name; the first use of one waits until it is ready."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._servers = servers
        self._ready: set[str] = set()

    def server(self, name: str) -> Server:
        """The server, ready. EngineError with the end of its log if it does not start."""
        server = self._servers[name]
        if name not in self._ready:
            server.wait_ready(240)
            self._ready.add(name)
        return server

    def client(self, name: str) -> Client:
        """A client of the server, once it is ready."""
        return self.server(name).client


def commit_len(answers: Sequence[Generation]) -> float:
    """Tokens a verify step over all answers; the first token of each comes from prefill."""
    return sum(len(a.tokens) - 1 for a in answers) / sum(a.steps for a in answers)


def embedded() -> dict[str, Any]:
    """What the embedded engine did on the same prompts (python -m ops.gpu.reference)."""
    document: dict[str, Any] = json.loads(lzma.decompress(Path(DATA).read_bytes()))
    return document


def embedded_commit_len(kind: str, method: str = "tree") -> float:
    """Its tokens a step over a set of prompts."""
    entry = embedded()[method][kind]
    return float(sum(entry["committed"]) / sum(entry["steps"]))
