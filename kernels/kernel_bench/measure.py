"""Runs the measurements on one GPU and reports progress."""

import sys
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from cuda_build import BuildError
from kernel_bench import rows as r
from kernel_bench.cases import (
    SPLITKV_CASES,
    TRITON_CASES,
    Problem,
    grid,
    grid_row,
    problems,
)
from kernel_bench.inputs import SCALE, Inputs, Pools, make_inputs
from kernel_bench.longleaf import Longleaf
from kernel_bench.peak import mma_rate
from kernel_bench.rows import Measured
from kernel_bench.sglang import SglangKernels, SglangMissingError
from kernel_bench.splitkv import SplitKv, fastest, tune
from kernel_bench.splitkv_plan import SMALL_SHARED
from kernel_bench.steps import step_kernels
from kernel_bench.timing import Sample, copy_rate, microseconds
from longleaf_kernels.reference import verify_mla_reference
from longleaf_kernels.verify import verify_workspace

MAX_ERROR = 1e-2


class WrongResultError(RuntimeError):
    """A contender's result is wrong: its time would mean nothing."""


class Bench:
    """One run: layer buffers, contenders and what they measured so far."""

    def __init__(self, sglang: str | None) -> None:
        self.device = torch.device("cuda")
        self.measured = Measured()
        self._begin = time.monotonic()
        torch.manual_seed(1)
        self._pools = Pools(self.device)
        self._ours = Longleaf(verify_workspace(self.device))
        self._processors: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        try:
            self._sglang: SglangKernels | None = SglangKernels.load(sglang)
        except SglangMissingError as missing:
            self._sglang = None
            self.measured.missing[r.TRITON] = str(missing)
        self._say("buffers filled")

    def run(self, with_grid: bool) -> Measured:
        """Measure everything."""
        self.ceilings()
        splitkv = self.tune_splitkv()
        self.check(splitkv)
        self.cases(splitkv)
        self.steps()
        if with_grid and self._sglang:
            self.grid()
        return self.measured

    def ceilings(self) -> None:
        """The copy rate and the mma.sync peak."""
        self.measured.copy = copy_rate(self._pools.bf16)
        self._say(f"copy {self.measured.copy.median / 1e9:.0f} GB/s, read and written")
        try:
            self.measured.mma = mma_rate(self.device)
        except (BuildError, OSError) as error:
            self.measured.missing["mma"] = str(error)
        else:
            self._say(f"mma.sync bf16 {self.measured.mma.median / 1e12:.0f} TFLOP/s")

    def tune_splitkv(self) -> Mapping[str, SplitKv]:
        """The plain split-KV kernel in its fastest shape within sm_120's shared memory, and in any.

        Chosen on the 9-node, 185k problem.
        """
        problem = problems()["verify_n9_185k"]
        inputs, layers = make_inputs(problem, self.device), self._pools.layers(problem)
        results = []
        for result in tune(inputs, layers, self._processors):
            results.append(result)
            us = f"{result.time.median:.1f} us" if result.time else result.why
            self._say(f"split-KV {result.shape}: {us}, {result.shared_bytes} bytes shared")
        chosen = {}
        for name, limit in ((r.SPLITKV, SMALL_SHARED), (r.SPLITKV_LARGE, None)):
            best = fastest(results, limit)
            if best:
                chosen[name] = SplitKv(best.shape, self._processors)
                self._say(f"{name}: {best.shape}")
        return chosen

    def check(self, splitkv: Mapping[str, SplitKv]) -> None:
        """Every contender against the float64 reference. Raises WrongResultError."""
        problem = problems()["verify_n9_16k"]
        inputs, layer = make_inputs(problem, self.device), self._pools.layers(problem)[0]
        arguments = inputs.indptr, inputs.indices, inputs.tree_kv, inputs.visible
        reference, _ = verify_mla_reference(inputs.q, layer, *arguments, scale=SCALE)
        contenders: dict[str, SplitKv | Longleaf | SglangKernels] = {r.OURS: self._ours, **splitkv}
        if self._sglang:
            contenders[r.TRITON] = self._sglang
        for name, contender in contenders.items():
            inputs.out.fill_(float("nan"))
            contender.prepare(inputs)(layer)
            error = float((inputs.out - reference).norm() / reference.norm())
            self._say(f"{name}: relative error {error:.2e}")
            if not error < MAX_ERROR:
                raise WrongResultError(f"{name} is wrong on {problem.name}: {error:.3g}")
            self.measured.errors[name] = float(f"{error:.3g}")

    def cases(self, splitkv: Mapping[str, SplitKv]) -> None:
        """The problems of the bar table."""
        for name, problem in problems().items():
            inputs, layers = make_inputs(problem, self.device), self._pools.layers(problem)
            self._time(name, r.OURS, self._ours, inputs, layers)
            if name in SPLITKV_CASES:
                for label, contender in splitkv.items():
                    self._time(name, label, contender, inputs, layers)
            if name in TRITON_CASES and self._sglang:
                self._time(name, r.TRITON, self._sglang, inputs, layers)

    def steps(self) -> None:
        """build_tree, accept, compact_kv."""
        for name, measure in step_kernels(self._pools.bf16).items():
            self.measured.steps[name] = measure()
            self._say(f"{name}: {self.measured.steps[name].median:.2f}")

    def grid(self) -> None:
        """Contexts x nodes x batches against SGLang's kernel for the same work."""
        assert self._sglang is not None
        for problem in grid():
            inputs, layers = make_inputs(problem, self.device), self._pools.layers(problem)
            ours, triton = (
                microseconds(
                    contender.prepare(inputs), layers, replays=20, replay_ms=20.0, total_ms=60.0
                )
                for contender in (self._ours, self._sglang)
            )
            self.measured.grid[problem] = ours, triton
            ratio = triton.median / ours.median
            self._say(
                f"{grid_row(problem)}: {ratio:.2f} ({ours.median:.1f} us, {triton.median:.1f} us)"
            )

    def _time(
        self,
        name: str,
        label: str,
        contender: SplitKv | Longleaf | SglangKernels,
        inputs: Inputs,
        layers: tuple[Tensor, ...],
    ) -> None:
        sample: Sample = microseconds(contender.prepare(inputs), layers)
        self.measured.times[label, name] = sample
        problem: Problem = inputs.problem
        rate = problem.bytes / sample.median * 1e-3
        self._say(
            f"{name} {label}: {sample.median:.2f} us, {rate:.0f} GB/s, "
            f"{problem.flops / sample.median * 1e-6:.1f} TFLOP/s, n {sample.n}"
        )

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._begin:5.1f} s] {what}", file=sys.stderr, flush=True)
