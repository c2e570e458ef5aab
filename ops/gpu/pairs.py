"""The servers of tests and benches: the tiny trained pair, and 61 layers without weights."""

import os
from pathlib import Path

from ops.gpu.models import (
    TINY_DRAFTER,
    TINY_TARGET,
    DummyDrafter,
    DummyTarget,
    stretch_tiny_pair,
)
from ops.gpu.servers import Method, ServerSpec

HOME = Path(os.environ.get("LONGLEAF_GPU_HOME", "/tmp/longleaf-gpu"))
LOGS = HOME / "logs"
TINY_CONTEXT = 20_480
STRETCHED_CONTEXT = 66_560  # 64k and an answer
LONG_CONTEXT = 262_144


def tiny(method: Method, name: str | None = None, nodes: tuple[int, ...] = ()) -> ServerSpec:
    """A server of the tiny trained pair, with its own drafter's window."""
    return ServerSpec(
        name=name or f"tiny-{method}",
        method=method,
        target=TINY_TARGET,
        drafter=TINY_DRAFTER if method.speculates else None,
        nodes=nodes,
        context_length=TINY_CONTEXT,
        pool_tokens=120_000,
    )


def stretched(method: Method, name: str, nodes: tuple[int, ...] = ()) -> ServerSpec:
    """A server of the tiny pair with positions past 64k: exact, not sensible, there."""
    target, drafter = stretch_tiny_pair(HOME / "models/stretched", STRETCHED_CONTEXT)
    return tiny(method, name, nodes).variant(
        name,
        target=target,
        drafter=drafter if method.speculates else None,
        context_length=STRETCHED_CONTEXT,
    )


def long(
    method: Method,
    name: str | None = None,
    nodes: tuple[int, ...] = (),
    *,
    heads: int = 8,
    ranks: int = 1,
) -> ServerSpec:
    """A server of 61 layers with real attention shapes, one request at a time.

    heads: of the whole model. What a rank holds of the rest does not depend on the ranks, so that
    a rank of many computes what one rank of a model with fewer heads computes.
    """
    target = DummyTarget(heads=heads, expert_size=64 * ranks)
    drafter = DummyDrafter(target=target, heads=heads, kv_heads=max(1, heads // 8))
    folder = HOME / f"models/61-{heads}-{ranks}"
    return ServerSpec(
        name=name or f"long-{method}",
        method=method,
        tensor_parallel=ranks,
        target=target.write(folder / "target"),
        drafter=drafter.write(folder / "drafter") if method.speculates else None,
        nodes=nodes,
        draft_window=2048 if method.speculates else None,
        context_length=LONG_CONTEXT,
        pool_tokens=230_000,
        running_requests=2,
        dummy=True,
    )
