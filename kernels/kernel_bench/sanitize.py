"""Runs compute-sanitizer over a small set of launches: python -m kernel_bench.sanitize.

memcheck finds accesses out of bounds, racecheck missing synchronization in shared memory; either
makes the command fail, and so does a wrong result. Needs a GPU, the compiled library and
compute-sanitizer of the CUDA toolkit.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_bench.cases import ROW_DIM, Problem
from kernel_bench.inputs import SCALE, random_tree
from longleaf_kernels import (
    SamplingTensors,
    accept_greedy,
    accept_sampled,
    build_tree,
    compact_kv,
)
from longleaf_kernels.reference import verify_mla_reference
from longleaf_kernels.verify import verify_mla, verify_workspace

ERROR_EXIT = 99
PAGE = 64


@dataclass(frozen=True)
class Verify:
    """One launch of verify_mla, small enough for a tool that slows it a thousandfold."""

    problem: Problem
    page_size: int = 1


VERIFY = (
    Verify(Problem((300, 0, 33), 9)),
    Verify(Problem((300, 70), 9), page_size=PAGE),
    Verify(Problem((200,), 1)),
    Verify(Problem((129, 15), 3, heads=16, e4m3=True)),
    Verify(Problem((100,), 32)),
    Verify(Problem((65,), 16, causal=True)),
)


def run_verify(case: Verify, device: torch.device) -> float:
    """Launch twice on one workspace; return the relative error of the second result.

    Inputs are drawn on the CPU, so that hardly any other kernel runs under the tool.
    """
    problem, size = case.problem, case.page_size
    total = problem.batch * problem.nodes
    pages = [-(-prefix // size) for prefix in problem.prefixes]
    pool = torch.randn(sum(pages) + 3, size, ROW_DIM)
    pool = pool.to(torch.float8_e4m3fn if problem.e4m3 else torch.bfloat16)
    dense = random_tree(problem.nodes, problem.causal).long()
    bits = (dense << torch.arange(problem.nodes)).sum(-1, keepdim=True)
    cpu: dict[str, Any] = {
        "q": torch.randn(total, problem.heads, ROW_DIM).bfloat16(),
        "kv_pool": pool if size > 1 else pool.view(-1, ROW_DIM),
        "kv_indptr": torch.tensor([0, *problem.prefixes]).cumsum(0).int(),
        "kv_indices": torch.randperm(sum(pages) + 3)[: sum(pages)].int(),
        "tree_kv": torch.randn(total, ROW_DIM).bfloat16(),
        "visible": None if problem.causal else bits.repeat(problem.batch, 1),
        "page_indptr": torch.tensor([0, *pages]).cumsum(0).int() if size > 1 else None,
    }
    tensors: dict[str, Any] = {
        name: None if value is None else value.to(device) for name, value in cpu.items()
    }
    workspace = verify_workspace(device)
    verify_mla(**tensors, scale=SCALE, workspace=workspace)
    out, _ = verify_mla(**tensors, scale=SCALE, workspace=workspace)
    reference, _ = verify_mla_reference(**cpu, scale=SCALE)
    return float((out.cpu() - reference).norm() / reference.norm())


def run_step_kernels(device: torch.device) -> None:
    """Launch build_tree, both accepts and compact_kv once each; check what is cheap to check."""
    batch, budget, vocabulary = 2, 16, 9000
    logits = (4.0 * torch.randn(batch, 7, vocabulary)).to(device)
    roots = torch.arange(batch).to(device)
    trees, _ = build_tree(logits, roots, budget)
    targets = torch.full((batch, budget + 1), -1).to(device)
    _same("accept_greedy", accept_greedy(trees.tokens, trees.parents, targets).path_len, 1)
    sampling = SamplingTensors(
        torch.tensor([0.8] * batch).to(device),
        torch.tensor([0.9] * batch).to(device),
        torch.tensor([0] * batch, dtype=torch.int32).to(device),
        torch.tensor([0.0] * batch).to(device),
    )
    target_logits = torch.randn(batch, budget + 1, vocabulary).to(device)
    uniforms = torch.rand(batch, 8, dtype=torch.float64).to(device)
    for every_node in (False, True):
        accept_sampled(
            trees.tokens,
            trees.parents,
            trees.depths,
            target_logits,
            sampling,
            uniforms,
            every_node=every_node,
        )
    pools = [torch.randn(64, ROW_DIM).bfloat16() for _ in range(5)]
    on_device = [pool.to(device) for pool in pools]
    slots = torch.arange(34).view(batch, 17)
    path = torch.tensor([[0, 2, 4, 6]] * batch, dtype=torch.int32)
    lengths = torch.tensor([4, 3], dtype=torch.int32)
    compact_kv(on_device, *(tensor.to(device) for tensor in (slots, path, lengths)))
    if not torch.equal(on_device[4].cpu()[slots[0, :4]], pools[4][slots[0, [0, 2, 4, 6]]]):
        raise SystemExit("compact_kv moved the wrong rows")


def _same(name: str, value: Tensor, expected: int) -> None:
    if value.tolist() != [expected] * len(value):
        raise SystemExit(f"{name} gave {value.tolist()}, expected {expected}")


def driver(part: str) -> None:
    """Run the launches of a part, the program that a tool watches."""
    device = torch.device("cuda")
    torch.manual_seed(2)
    for case in VERIFY if part != "step" else ():
        error = run_verify(case, device)
        print(f"{case.problem.name} page {case.page_size}: relative error {error:.2e}", flush=True)
        if not error < 1e-2:
            raise SystemExit("wrong result")
    if part != "verify":
        run_step_kernels(device)
        print("step kernels ran")
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Check:
    """One tool over one part of the launches."""

    name: str
    tool: str
    part: str

    @property
    def command(self) -> list[str]:
        """What to run."""
        return [
            *("compute-sanitizer", "--tool", self.tool, "--error-exitcode", str(ERROR_EXIT)),
            *(sys.executable, "-m", "kernel_bench.sanitize", "--driver", self.part),
        ]


PARTS = ("step", "verify", "all")
CHECKS = (
    Check("memcheck-step", "memcheck", "step"),
    Check("memcheck-verify", "memcheck", "verify"),
    Check("racecheck-step", "racecheck", "step"),
    Check("racecheck-verify", "racecheck", "verify"),
)


def main() -> int:
    """Run from the command line; non-zero if a tool finds anything."""
    parser = argparse.ArgumentParser(prog="make sanitize-kernels", description=__doc__)
    names = [check.name for check in CHECKS]
    parser.add_argument("--check", choices=names, action="append", help="default: all")
    parser.add_argument("--driver", choices=PARTS, help="run launches without a tool")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("sanitize-kernels needs a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    if arguments.driver:
        driver(arguments.driver)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH; it is in the CUDA toolkit", file=sys.stderr)
        return 2
    # Every tensor is its own allocation, so that an access past one is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for check in CHECKS:
        if check.name not in (arguments.check or names):
            continue
        print(f"{check.name}: {' '.join(check.command)}", flush=True)
        if subprocess.run(check.command, env=environment, check=False).returncode:
            failed.append(check.name)
    print(f"failed: {', '.join(failed)}" if failed else "clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
