"""A server whose node count can be set from outside while it runs: fixed at any width, or adaptive.

Two servers of one configuration differ by up to a third in speed on a model that the host bounds,
by where the system puts their processes; one server that switches does not differ from itself.
`register` is a plugin for SGLang in place of ours: it registers ours, and puts a budget that reads
a file in place of the adaptive one, which it asks and teaches while the file says so.
"""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

PLUGIN = "longleaf_switch"
FILE = "LONGLEAF_SWITCH"
"""Environment variable: the file that `Switch` writes."""


class Switch:
    """Sets what a server does from its next step on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def fix(self, nodes: int) -> None:
        """Let every step have that many nodes."""
        self._write({"nodes": nodes})

    def adapt(self, step_ms: Sequence[tuple[int, int, float]]) -> None:
        """Let an adaptive budget choose, told these costs; the same costs keep what it learnt."""
        self._write({"step_ms": [list(item) for item in step_ms]})

    def _write(self, order: dict[str, Any]) -> None:
        # One call of stat tells a new order from an old one.
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(order))
        new.replace(self.path)


class SwitchedBudget:
    """What `longleaf.engine.widths.Budget` asks for, as the file says."""

    def __init__(self, path: Path, nodes: Sequence[int], depth: int, layers: int) -> None:
        self._path, self._nodes, self._depth, self._layers = path, nodes, depth, layers
        self._seen: tuple[int, int] | None = None
        self._fixed: int | None = max(nodes)
        self._costs: Any = None
        self._adaptive: Any = None

    def choose(self, context: int, batch: int) -> int:
        """Return the ordered node count, or the adaptive budget's."""
        self._read()
        if self._fixed is not None:
            return self._fixed
        chosen: int = self._adaptive.choose(context, batch)
        return chosen

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Teach the adaptive budget, while it chooses."""
        if self._fixed is None:
            self._adaptive.observe(width, accepted, paths)

    def _read(self) -> None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return
        stamp = found.st_ino, found.st_mtime_ns
        if stamp == self._seen:
            return
        self._seen = stamp
        order = json.loads(self._path.read_text())
        self._fixed = order.get("nodes")
        if self._fixed is None and order["step_ms"] != self._costs:
            self._costs = order["step_ms"]
            from longleaf.engine.widths import make_budget

            measured = [tuple(item) for item in self._costs]
            self._adaptive = make_budget(self._nodes, self._depth, self._layers, measured)


def register() -> None:
    """The entry point."""
    from longleaf.engine.plugin import register as register_ours

    register_ours()
    worker: Any = import_module("longleaf.engine.worker")
    path = Path(os.environ[FILE])

    def switched(nodes: Sequence[int], depth: int, layers: int, measured: Any = ()) -> Any:
        del measured
        return SwitchedBudget(path, sorted(nodes), depth, layers)

    worker.make_budget = switched
