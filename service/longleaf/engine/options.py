"""What the plugin may be told beyond SGLang's arguments: one object, read once a process."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

ENGINE_VARIABLE = "LONGLEAF_ENGINE"
DEFAULT_NODES = (1, 8, 16, 32, 64)
MAX_NODES = 128
MAX_SEED = 2**62
MAX_BLOCK = 16
"""The tree kernels take 15 drafted depths."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the DDTREE worker.

    nodes: node counts (root included) whose verify graphs are captured; empty for those of
    `DEFAULT_NODES` below --speculative-num-draft-tokens, and that number itself. One alone is
    what every step takes; among several the adaptive budget chooses, 1 being no speculation.
    grammar_nodes: most nodes of a step whose batch holds a constrained request, for each node
    costs the CPU one walk of the grammar; at least the smallest captured count is taken.
    seed_chain: the tree always holds the drafter's most probable chain.
    sample_phases: one step in so many has its phases timed with CUDA events; 0 for none.
    sampling_seed: added to SGLang's random seed for the uniforms of sampled requests.
    step_ms: measured milliseconds of a step at batch 1, as (nodes, context, milliseconds), which
    the adaptive budget takes in place of its model's: for every captured count or for none.
    """

    nodes: tuple[int, ...] = ()
    grammar_nodes: int = 16
    seed_chain: bool = True
    sample_phases: int = 32
    sampling_seed: int = 0
    step_ms: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        for count in self.nodes:
            if not 1 <= count <= MAX_NODES:
                raise ValueError(f"nodes must be from 1 to {MAX_NODES}, got {count}")
        if len(set(self.nodes)) < len(self.nodes):
            raise ValueError(f"nodes must differ, got {list(self.nodes)}")
        if self.grammar_nodes < 1:
            raise ValueError(f"grammar_nodes must be at least 1, got {self.grammar_nodes}")
        if self.sample_phases < 0:
            raise ValueError(f"sample_phases must not be negative, got {self.sample_phases}")
        if not abs(self.sampling_seed) < MAX_SEED:
            raise ValueError(
                f"sampling_seed must be between -{MAX_SEED} and {MAX_SEED}, "
                f"got {self.sampling_seed}"
            )
        for row in self.step_ms:
            nodes, context, milliseconds = row
            timed = math.isfinite(milliseconds) and milliseconds > 0
            if not 1 <= nodes <= MAX_NODES or context < 0 or not timed:
                raise ValueError(
                    f"step_ms must be [nodes from 1 to {MAX_NODES}, context of at least 0, "
                    f"milliseconds above 0], got {list(row)}"
                )
        places = [row[:2] for row in self.step_ms]
        if len(set(places)) < len(places):
            raise ValueError("step_ms must give one time for a node count and context")

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        """Read options from a JSON object; raises ValueError for what is not one of them."""
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{ENGINE_VARIABLE} must be a JSON object: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"{ENGINE_VARIABLE} must be a JSON object, got {text!r}")
        known = {field.name: getattr(cls(), field.name) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise ValueError(
                    f"{ENGINE_VARIABLE} has no option {name!r}; it has {', '.join(known)}"
                )
            values[name] = _typed(name, value, known[name])
        return cls(**values)

    def to_json(self) -> str:
        """Write options so that `from_json` reads the same."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})


def _typed(name: str, value: Any, example: Any) -> Any:
    if name == "step_ms":
        return _measured(value)
    if isinstance(example, tuple):
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise ValueError(f"{ENGINE_VARIABLE}: {name} must be a list of integers, got {value!r}")
    if type(value) is not type(example):
        kind = type(example).__name__
        raise ValueError(f"{ENGINE_VARIABLE}: {name} must be of type {kind}, got {value!r}")
    return value


def _measured(value: Any) -> tuple[tuple[int, int, float], ...]:
    rows: list[tuple[int, int, float]] = []
    given: list[Any] = value if isinstance(value, list) else [value]
    for row in given:
        kinds = [type(item) for item in row] if isinstance(row, list) else []
        if kinds not in ([int, int, int], [int, int, float]):
            raise ValueError(
                f"{ENGINE_VARIABLE}: step_ms must be a list of [nodes, context, milliseconds], "
                f"got {value!r}"
            )
        try:
            rows.append((row[0], row[1], float(row[2])))
        except OverflowError as error:
            raise ValueError(f"{ENGINE_VARIABLE}: step_ms has a time beyond any number") from error
    return tuple(rows)


def read_options(environment: Mapping[str, str]) -> EngineOptions:
    """Read the options of an environment; the defaults where it says nothing."""
    text = environment.get(ENGINE_VARIABLE, "").strip()
    return EngineOptions.from_json(text) if text else EngineOptions()


@cache
def engine_options() -> EngineOptions:
    """Return the options of this process, read once."""
    return read_options(os.environ)


def captured_nodes(options: EngineOptions, widest: int | None) -> tuple[int, ...]:
    """Return the node counts to capture, ascending; widest: what the server was told, if it was.

    Raises ValueError where the two contradict each other, and where step_ms is of other counts:
    times of some only would be compared with the model's of the rest.
    """
    nodes = _captured(options, widest)
    timed = {row[0] for row in options.step_ms}
    if timed and timed != set(nodes):
        raise ValueError(
            f"step_ms is of {sorted(timed)} nodes, captured are {list(nodes)}: it must time each "
            "captured count and no other"
        )
    return nodes


def _captured(options: EngineOptions, widest: int | None) -> tuple[int, ...]:
    if options.nodes:
        if widest is not None and max(options.nodes) > widest:
            raise ValueError(
                f"--speculative-num-draft-tokens {widest} is below the most nodes that "
                f"{ENGINE_VARIABLE} asks for, {max(options.nodes)}"
            )
        return tuple(sorted(options.nodes))
    if widest is None:
        return DEFAULT_NODES
    return (*(count for count in DEFAULT_NODES if count < widest), widest)
