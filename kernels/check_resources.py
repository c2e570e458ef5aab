"""Compile every kernel for every target and hold its resources to the committed table.

Needs nvcc, cuobjdump and nvdisasm of the releases pinned in requirements-cuda.txt (the table
depends on the compiler), a host compiler and c++filt, no GPU:
`make check-kernels`, or with --update to write the table anew after a change that is meant.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import cuda_build

TABLE = cuda_build.ROOT / "resources.json"
SHARED_LIMIT = 101_376
"""Bytes of shared memory a block may have on sm_120, kept on every target."""
COUNTED = ("HMMA", "QMMA", "LDSM", "LDGSTS", "UBLKCP", "UTMALDG", "LDL", "STL")
"""Tensor products, matrix loads, asynchronous copies, and local memory (loads and stores)."""
LONGER = 1.05
"""How much longer a kernel may get before that counts as a change."""
Name = tuple[str, str]  # target, kernel


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one target, in bytes where nothing else is said."""

    registers: int
    stack: int
    spilled: int  # stores and loads
    static_shared: int
    dynamic_shared: int = 0
    instructions: int = 0
    counted: dict[str, int] = field(default_factory=dict)


def parse_ptxas(log: str) -> Iterator[tuple[Name, Resources]]:
    """Yield ((target, mangled kernel), resources) from what `ptxas -v` printed."""
    name: Name | None = None
    stack = spilled = 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(sm_\w+)'", line):
            name = entry[2], entry[1]
        elif spills := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spilled = int(spills[1]), int(spills[2]) + int(spills[3])
        elif (used := re.search(r"Used (\d+) registers", line)) and name is not None:
            shared = re.search(r"(\d+) bytes smem", line)
            yield name, Resources(int(used[1]), stack, spilled, int(shared[1]) if shared else 0)
            name = None


def parse_sass(dump: str) -> dict[Name, Counter[str]]:
    """Return how often each opcode stands in each kernel of a `cuobjdump --dump-sass`."""
    opcodes: defaultdict[Name, Counter[str]] = defaultdict(Counter)
    target = kernel = ""
    for line in dump.splitlines():
        if code := re.match(r"\s*(?:arch = |code for )(sm_\w+)", line):
            target = code[1]
        elif function := re.match(r"\s*Function : (\S+)", line):
            kernel = function[1]
        elif step := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line):
            opcodes[target, kernel][step[1]] += 1
    return dict(opcodes)


def short_name(demangled: str) -> str:
    """Return a kernel's name without return type, namespaces and parameters."""
    plain = re.sub(r"\([^()]*\)$", "", demangled.removeprefix("void "))
    return re.sub(r"\b(longleaf|\(anonymous namespace\))::", "", plain)


def compare(name: Name, found: Resources, expected: Resources | None) -> list[str]:
    """Return what is worse than the table, or than any kernel may be."""
    where = f"{name[0]} {name[1]}"
    shared = found.static_shared + found.dynamic_shared
    worse = []
    if found.spilled:
        worse.append(f"{where}: spills {found.spilled} bytes")
    if shared > SHARED_LIMIT:
        worse.append(f"{where}: {shared} bytes of shared memory, the limit is {SHARED_LIMIT}")
    if expected is None:
        return [*worse, f"{where}: not in the table"]
    for what in ("registers", "stack", "static_shared", "dynamic_shared"):
        now, before = getattr(found, what), getattr(expected, what)
        if now > before:
            worse.append(f"{where}: {what} {before} -> {now}")
    if found.instructions > LONGER * expected.instructions:
        worse.append(f"{where}: instructions {expected.instructions} -> {found.instructions}")
    for opcode in COUNTED:
        now, before = found.counted.get(opcode, 0), expected.counted.get(opcode, 0)
        if now != before:
            worse.append(f"{where}: {opcode} {before} -> {now}")
    return worse


def measure(units: Sequence[cuda_build.Unit], library: Path, tools: Path) -> dict[Name, Resources]:
    """Return the resources of every kernel in the units, by target and short name."""
    mangled: dict[Name, Resources] = {}
    for unit in units:
        mangled.update(parse_ptxas(unit.log.read_text()))
        dump = _run([tools / "cuobjdump", "--dump-sass", unit.object], tools)
        for name, opcodes in parse_sass(dump).items():
            if name in mangled:
                counted = {opcode: opcodes[opcode] for opcode in COUNTED if opcodes[opcode]}
                mangled[name] = replace(
                    mangled[name], instructions=opcodes.total(), counted=counted
                )
    symbols = sorted({kernel for _, kernel in mangled})
    demangled = _run(["c++filt", *symbols], tools).splitlines()
    names = dict(zip(symbols, map(short_name, demangled), strict=True))
    dynamic = ctypes.CDLL(str(library)).longleaf_dynamic_shared_bytes
    return {
        (target, names[kernel]): replace(resources, dynamic_shared=dynamic(names[kernel].encode()))
        for (target, kernel), resources in mangled.items()
    }


def _run(command: Sequence[object], tools: Path) -> str:
    environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}  # cuobjdump calls nvdisasm
    done = subprocess.run(
        [str(word) for word in command], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise cuda_build.BuildError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def read_table(path: Path) -> dict[Name, Resources]:
    """Return the committed table."""
    targets = json.loads(path.read_text())["targets"]
    return {
        (target, kernel): Resources(**entry)
        for target, kernels in targets.items()
        for kernel, entry in kernels.items()
    }


def write_table(path: Path, found: dict[Name, Resources], version: tuple[int, int]) -> None:
    """Write a table of what was found, compiled by that CUDA release."""
    targets: defaultdict[str, dict[str, object]] = defaultdict(dict)
    for (target, kernel), resources in sorted(found.items()):
        targets[target][kernel] = asdict(resources)
    table = {"cuda": "{}.{}".format(*version), "targets": targets}
    path.write_text(json.dumps(table, indent=1) + "\n")


def show(found: dict[Name, Resources]) -> None:
    """Print one line a kernel and target."""
    head = ("target", "kernel", "regs", "spill", "shared", "instr", *COUNTED)
    rows = [
        (
            *(target, kernel, resources.registers, resources.spilled),
            *(resources.static_shared + resources.dynamic_shared, resources.instructions),
            *(resources.counted.get(opcode, 0) for opcode in COUNTED),
        )
        for (target, kernel), resources in sorted(found.items())
    ]
    for row in (head, *rows):
        print(f"{row[0]:8}{row[1]:46}" + "".join(f"{value!s:>8}" for value in row[2:]))


def main() -> None:
    """Check, or update the table."""
    parser = argparse.ArgumentParser(description="Check the kernels' compiled resources.")
    parser.add_argument("--update", action="store_true", help="write the table instead")
    parser.add_argument("--jobs", type=int, default=None)
    arguments = parser.parse_args()
    directory = cuda_build.ROOT.parent / "build" / "check-kernels"
    library = directory / cuda_build.LIBRARY.name
    try:
        toolkit = cuda_build.find_toolkit(os.environ)
        units = cuda_build.build(library, directory, os.environ, arguments.jobs)
        found = measure(units, library, toolkit.nvcc.resolve().parent)
    except cuda_build.BuildError as error:
        sys.exit(f"error: {error}")
    show(found)
    if arguments.update:
        write_table(TABLE, found, toolkit.version)
        return
    expected = read_table(TABLE)
    gone = sorted(expected.keys() - found.keys())
    worse = [f"{target} {kernel}: gone" for target, kernel in gone]
    for name, resources in sorted(found.items()):
        worse += compare(name, resources, expected.get(name))
    if worse:
        print(*worse, sep="\n")
        sys.exit(
            f"error: worse than {TABLE.name}, or changed; if that is meant, "
            "`make check-kernels CHECK_ARGS=--update`"
        )
    print(f"{len(found)} kernels as in {TABLE.name}, or better")


if __name__ == "__main__":
    main()
