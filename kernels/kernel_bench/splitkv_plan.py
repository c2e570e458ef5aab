"""How the plain split-KV Triton kernel cuts a problem, and the shapes of its tiles."""

from dataclasses import dataclass

SMALL_SHARED = 101_376
"""Shared memory of a block on sm_120, bytes."""


@dataclass(frozen=True)
class Shape:
    """Rows and tokens of a tile, warps, pipeline stages, and blocks a multiprocessor."""

    rows: int
    tokens: int
    warps: int
    stages: int
    waves: int = 1


SHAPES = (
    Shape(16, 32, 4, 2, 2),
    Shape(16, 32, 4, 2, 3),
    Shape(16, 32, 8, 3, 2),
    Shape(32, 32, 8, 2),
    Shape(32, 32, 16, 2),
    Shape(32, 64, 8, 2),
    Shape(32, 64, 16, 2),
    Shape(64, 32, 8, 2),
)
"""What `tune` tries."""


@dataclass(frozen=True)
class Split:
    """How a problem is cut."""

    row_tiles: int
    prefix_pieces: int


def plan(rows: int, batch: int, processors: int, shape: Shape) -> Split:
    """One piece a block and as many blocks as run at once, the tree's piece among them."""
    tiles = -(-rows // shape.rows)
    return Split(tiles, max(1, processors * shape.waves // (tiles * batch) - 1))
