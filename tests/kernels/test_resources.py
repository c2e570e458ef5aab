"""The compile-time check: what it reads from the tools' output, and what it calls worse."""

from dataclasses import replace
from pathlib import Path

import pytest

import check_resources
from check_resources import Resources, compare, parse_ptxas, parse_sass, short_name

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8longleaf4walkIfEEv' for 'sm_90a'
ptxas info    : Function properties for _ZN8longleaf4walkIfEEv
    24 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 24 bytes cumulative stack size, 25108 bytes smem
ptxas info    : Compile time = 12.0 ms
ptxas info    : Compiling entry function '_ZN8longleaf4walkIfEEv' for 'sm_120a'
ptxas info    : Function properties for _ZN8longleaf4walkIfEEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers
"""
SASS = """\
Fatbin elf code:
================
arch = sm_120a
code version = [1,8]
	code for sm_120a
		Function : _ZN8longleaf4walkIfEEv
	.headerflags	@"EF_CUDA_SM120"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;        /* 0x0000df00ff017b82 */
                                                                  /* 0x000fe20000000800 */
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;  /* 0x0 */
        /*0020*/             @!UP1 STL.64 [R1+0xa0], R14 ;        /* 0x0000a00e01007387 */
        /*0030*/               @P2 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R6.64] ;  /* 0x0 */
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;  /* 0x0 */
		..........
arch = sm_90a
		Function : other
        /*0000*/                   EXIT ;                         /* 0x000000000000794d */
"""
NAME = "sm_120a", "walk<float>"
FOUND = Resources(64, 0, 0, 1000, 2000, 500, {"HMMA": 8})


def test_registers_spills_and_shared_memory_of_each_target() -> None:
    assert dict(parse_ptxas(PTXAS)) == {
        ("sm_90a", "_ZN8longleaf4walkIfEEv"): Resources(64, 24, 48, 25108),
        ("sm_120a", "_ZN8longleaf4walkIfEEv"): Resources(38, 0, 0, 0),
    }


def test_opcodes_of_each_target_with_and_without_predicates() -> None:
    opcodes = parse_sass(SASS)
    walk = opcodes["sm_120a", "_ZN8longleaf4walkIfEEv"]
    assert walk == {"LDC": 1, "HMMA": 2, "STL": 1, "LDGSTS": 1}
    assert opcodes["sm_90a", "other"] == {"EXIT": 1}


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("void longleaf::walk<float>(longleaf::Params)", "walk<float>"),
        ("longleaf::plain(int, longleaf::P const*)", "plain"),
        ("void longleaf::verify<1, longleaf::Bf16>(longleaf::P)", "verify<1, Bf16>"),
    ],
)
def test_names(demangled: str, name: str) -> None:
    assert short_name(demangled) == name


def test_what_is_as_the_table_or_better_passes() -> None:
    assert compare(NAME, FOUND, FOUND) == []
    better = replace(FOUND, registers=40, static_shared=0, instructions=400)
    assert compare(NAME, better, FOUND) == []
    assert compare(NAME, replace(FOUND, instructions=524), FOUND) == []


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (replace(FOUND, spilled=8), FOUND, "spills 8 bytes"),
        (replace(FOUND, spilled=8), replace(FOUND, spilled=8), "spills 8 bytes"),
        (
            replace(FOUND, dynamic_shared=100_377),
            replace(FOUND, dynamic_shared=100_377),
            "101377 bytes of shared memory, the limit is 101376",
        ),
        (replace(FOUND, registers=65), FOUND, "registers 64 -> 65"),
        (replace(FOUND, stack=16), FOUND, "stack 0 -> 16"),
        (replace(FOUND, dynamic_shared=2001), FOUND, "dynamic_shared 2000 -> 2001"),
        (replace(FOUND, instructions=526), FOUND, "instructions 500 -> 526"),
        (replace(FOUND, counted={}), FOUND, "HMMA 8 -> 0"),
        (replace(FOUND, counted={"HMMA": 8, "LDL": 2}), FOUND, "LDL 0 -> 2"),
        (FOUND, None, "not in the table"),
    ],
)
def test_what_is_worse_is_named(found: Resources, expected: Resources | None, message: str) -> None:
    assert compare(NAME, found, expected) == [f"sm_120a walk<float>: {message}"]


def test_a_table_reads_back_as_written(tmp_path: Path) -> None:
    found = {NAME: FOUND, ("sm_90a", "walk<float>"): replace(FOUND, registers=90)}
    path = tmp_path / "table.json"
    check_resources.write_table(path, found, (13, 0))
    assert check_resources.read_table(path) == found


def test_the_committed_table_holds_both_targets_and_no_spill() -> None:
    table = check_resources.read_table(check_resources.TABLE)
    kernels = {target: {k for t, k in table if t == target} for target in ("sm_90a", "sm_120a")}
    assert kernels["sm_90a"] == kernels["sm_120a"]
    assert {"build_tree_kernel<float>", "compact_kv_kernel"} <= kernels["sm_120a"]
    for name, resources in table.items():
        assert compare(name, resources, resources) == []
