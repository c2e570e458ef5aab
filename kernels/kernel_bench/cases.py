"""What is measured: problems, rows of the results file with their bars, and the grid."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

LATENT_DIM = 512
ROW_DIM = 576
LAYERS = 61
SLOTS = 189_096
"""Slots of one layer's buffer: 61 of them are 13.3 GB, far more than any cache."""
FLOP_PER_PAIR = 2 * (ROW_DIM + LATENT_DIM)
"""Of one query row against one cached row: a score and a weighted value, 2 a multiply-add."""
SHORT, MIDDLE, LONG, LONGEST = 1024, 16_384, 65_536, 185_000
BLOCK, BUDGET, VOCABULARY = 8, 64, 163_840
COMPACTED_ROWS = 7


@dataclass(frozen=True)
class Problem:
    """One launch: prefix lengths of the requests, nodes of each, query heads.

    e4m3: the pool holds float8, else bfloat16. causal: an extend of new tokens, no tree.
    """

    prefixes: tuple[int, ...]
    nodes: int
    heads: int = 8
    e4m3: bool = False
    causal: bool = False

    @property
    def batch(self) -> int:
        """Number of requests."""
        return len(self.prefixes)

    @property
    def tokens(self) -> int:
        """Cached tokens of all requests."""
        return sum(self.prefixes)

    @property
    def bytes(self) -> float:
        """Bytes of the cached rows, each read once."""
        return float(self.tokens) * ROW_DIM * (1 if self.e4m3 else 2)

    @property
    def flops(self) -> float:
        """Floating-point operations over the cached rows."""
        return float(self.tokens) * self.nodes * self.heads * FLOP_PER_PAIR

    @property
    def name(self) -> str:
        """A short description for progress lines."""
        lengths = f"{self.prefixes[0]}" if len(set(self.prefixes)) == 1 else "mixed"
        kind = "extend" if self.causal else "n"
        cache = " e4m3" if self.e4m3 else ""
        return f"{kind}{self.nodes} {lengths} b{self.batch} h{self.heads}{cache}"


def log_uniform(count: int, low: float, high: float) -> tuple[int, ...]:
    """Lengths evenly spread in the logarithm, long and short ones alternating."""
    lengths = [round(low * (high / low) ** (i / (count - 1))) for i in range(count)]
    return tuple(
        x for pair in zip(lengths[: count // 2], lengths[::-1], strict=False) for x in pair
    )


def problems() -> dict[str, Problem]:
    """Problems by the name that rows use: `<name>_us` is the time of a launch."""
    return {
        **{
            f"verify_n9_{label}": Problem((length,), 9)
            for label, length in (
                ("0", 0),
                ("1k", SHORT),
                ("16k", MIDDLE),
                ("64k", LONG),
                ("185k", LONGEST),
            )
        },
        "verify_n32_185k": Problem((LONGEST,), 32),
        "verify_n64_64k": Problem((LONG,), 64),
        "decode_64k": Problem((LONG,), 1),
        "decode_185k": Problem((LONGEST,), 1),
        "verify_n9_185k_fp8": Problem((LONGEST,), 9, e4m3=True),
        "verify_b32_mixed": Problem(log_uniform(32, 1000, LONGEST), 9),
        "verify_h64_b4_64k": Problem((LONG,) * 4, 9, heads=64),
        "extend16_32k": Problem((32_768,), 16, causal=True),
    }


TRITON_CASES = (
    "verify_n9_1k",
    "verify_n9_16k",
    "verify_n9_185k",
    "decode_64k",
    "decode_185k",
    "extend16_32k",
)
"""Problems that SGLang's Triton kernels are timed on, beside the grid."""
SPLITKV_CASES = ("verify_n9_1k", "verify_n9_16k", "verify_n9_185k")


@dataclass(frozen=True)
class Bar:
    """A row that must be there: its name, unit, the bar to meet and the stretch goal."""

    name: str
    unit: str
    bar: float
    better: Literal["higher", "lower"] = "higher"
    stretch: float | None = None


BARS = (
    Bar("verify_n9_185k_bf16_copy_share", "share", 0.45, stretch=0.55),
    Bar("verify_n9_185k_x_triton", "ratio", 250),
    Bar("verify_n9_185k_x_splitkv", "ratio", 1.9),
    Bar("verify_n9_16k_x_triton", "ratio", 115, stretch=150),
    Bar("verify_n9_1k_us", "us", 12, "lower", 9),
    Bar("verify_n9_1k_x_triton", "ratio", 14),
    Bar("verify_n32_185k_mma_share", "share", 0.45, stretch=0.55),
    Bar("verify_n64_64k_mma_share", "share", 0.48, stretch=0.55),
    Bar("decode_64k_copy_share", "share", 0.55, stretch=0.65),
    Bar("decode_185k_copy_share", "share", 0.75, stretch=0.85),
    Bar("verify_n9_185k_fp8_speedup", "ratio", 1.6, stretch=1.8),
    Bar("verify_b32_mixed_efficiency", "ratio", 0.85, stretch=0.95),
    Bar("verify_h64_b4_64k_mma_share", "share", 0.45, stretch=0.60),
    Bar("decode_64k_x_triton", "ratio", 2.5),
    Bar("extend16_32k_x_triton", "ratio", 60),
    Bar("grid_min_ratio_vs_triton", "ratio", 1.0),
    Bar("build_tree_us", "us", 40, "lower", 20),
    Bar("compact_kv_us", "us", 8, "lower"),
)

GRID_CONTEXTS = (0, 1, 128, 1024, 8192, 65_536, 200_000)
GRID_NODES = (1, 2, 4, 9, 16, 32, 64)
GRID_BATCHES = (1, 2, 8, 32)


def grid() -> Iterator[Problem]:
    """Equal prefixes: every context with every number of nodes and every batch."""
    for batch, context, nodes in product(GRID_BATCHES, GRID_CONTEXTS, GRID_NODES):
        yield Problem((context,) * batch, nodes)


def grid_row(problem: Problem) -> str:
    """The row that holds a grid point's ratio."""
    return f"grid_b{problem.batch}_n{problem.nodes}_{problem.prefixes[0]}_x_triton"
