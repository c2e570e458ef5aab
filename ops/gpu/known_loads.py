"""GPU loads whose figures are known beforehand: what an exporter must be able to tell apart."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_bench.cases import LONG, LONGEST, ROW_DIM, Problem
from kernel_bench.inputs import make_inputs, slots_for
from kernel_bench.longleaf import Longleaf
from kernel_bench.sglang import SglangKernels
from kernel_bench.timing import Launch, milliseconds

_CHUNK_MS = 5.0
_LAYERS = 8
_NODES = 9


@dataclass(frozen=True)
class Load:
    """Work that repeats. ``chunk`` does a piece of it, keeping the GPU busy from call to call.

    work: of one chunk, in ``unit`` (FLOP, or bytes read and written); 0 where nothing is done.
    """

    name: str
    note: str
    chunk: Callable[[], None]
    work: float = 0.0
    unit: str = ""


class _OneAhead:
    """Enqueues a chunk, then waits for the one before: the GPU never waits for the host."""

    def __init__(self, enqueue: Callable[[], object]) -> None:
        self._enqueue = enqueue
        self._before: torch.cuda.Event | None = None

    def __call__(self) -> None:
        self._enqueue()
        event = torch.cuda.Event(blocking=True)
        event.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = event


def idle() -> Load:
    """A CUDA context, and nothing that runs."""
    return Load("idle", "a CUDA context, nothing runs", lambda: time.sleep(_CHUNK_MS / 1e3))


def known_loads(sglang: str | None = None) -> Iterator[Load]:
    """The loads in order, each made when it is asked for; ``sglang``: see ``find_sources``."""
    device = torch.device("cuda")
    torch.manual_seed(1)
    yield idle()
    yield matmul(device)
    yield copy(device)
    pool = torch.empty(_LAYERS * slots_for(Problem((LONG,), _NODES)), ROW_DIM, device=device)
    rows = pool.normal_().bfloat16()
    del pool
    kernels = SglangKernels.load(sglang)
    yield verify("sglang-verify-64k", "SGLang's Triton extend kernel", LONG, rows, kernels)
    for name, length in (("longleaf-verify-64k", LONG), ("longleaf-verify-185k", LONGEST)):
        yield verify(name, "this project's verify_mla", length, rows, None)


def matmul(device: torch.device, size: int = 8192) -> Load:
    """Tensor pipes: square bfloat16 products."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    repeats = _repeats(lambda: torch.mm(left, right, out=out))

    def enqueue() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=out)

    note = f"bf16 matrix products, {size} x {size} x {size}, random data"
    return Load("matmul", note, _OneAhead(enqueue), 2.0 * size**3 * repeats, "FLOP")


def copy(device: torch.device, size: int = 2 << 30) -> Load:
    """Device memory: a buffer copied onto another."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    repeats = _repeats(lambda: target.copy_(source))

    def enqueue() -> None:
        for _ in range(repeats):
            target.copy_(source)

    note = f"device copies of {size} bytes"
    return Load("copy", note, _OneAhead(enqueue), 2.0 * size * repeats, "B")


def verify(name: str, who: str, length: int, rows: Tensor, sglang: SglangKernels | None) -> Load:
    """Verify attention of one request over distinct layers' buffers; this project's without
    ``sglang``. Work is the bytes of the cached rows, each read once. A graph keeps nothing alive
    of what it reads.
    """
    problem = Problem((length,), _NODES)
    inputs = make_inputs(problem, rows.device)
    launch: Launch = sglang.prepare(inputs) if sglang else Longleaf.on(inputs).prepare(inputs)
    layers = rows.split(slots_for(problem))
    launch(layers[0])
    repeats = _repeats(lambda: launch(layers[1]))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for turn in range(repeats):
            launch(layers[turn % len(layers)])

    def enqueue(_reads: object = (inputs, launch, rows)) -> None:
        graph.replay()

    note = f"{who}: {_NODES} nodes, {problem.heads} heads, {length} cached rows of bf16, batch 1"
    return Load(name, note, _OneAhead(enqueue), problem.bytes * repeats, "B")


def _repeats(action: Callable[[], object]) -> int:
    action()
    return max(1, round(_CHUNK_MS / max(1e-3, milliseconds(action, 3)[-1])))
