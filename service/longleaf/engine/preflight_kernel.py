"""Known-answer test of the verify kernel on every GPU.

``python -m longleaf.engine.preflight_kernel``: attention of a small tree over scattered rows, held
to the float64 reference. Prints one line and ends with status 0, or with 1 and the sentence that
says what was wrong.
"""

import sys

NODES, HEADS, PREFIX, SLOTS = 9, 8, 1500, 4096
LARGEST_ERROR = 6e-3
"""Relative, of bfloat16 results."""


def visible_bits(parents: list[int]) -> list[int]:
    """Ancestors of each node, itself included, as bits."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    return bits


def relative_error_on(index: int) -> float:
    """Root mean square of the kernel's error on one GPU over that of the right answer."""
    import torch

    from longleaf_kernels.reference import verify_mla_reference
    from longleaf_kernels.verify import ROW_DIM, verify_mla, verify_workspace

    torch.manual_seed(index)
    device = torch.device("cuda", index)
    rows = torch.randn(SLOTS, ROW_DIM).bfloat16()
    arguments = (
        torch.randn(NODES, HEADS, ROW_DIM).bfloat16(),
        rows,
        torch.tensor([0, PREFIX], dtype=torch.int32),
        torch.randperm(SLOTS, dtype=torch.int32)[:PREFIX],
        torch.randn(NODES, ROW_DIM).bfloat16(),
        torch.tensor(visible_bits([-1, 0, 1, 2, 0, 4, 1, 6, 7]), dtype=torch.int64)[:, None],
    )
    scale = ROW_DIM**-0.5
    right, _ = verify_mla_reference(*arguments, scale=scale)
    q, pool, lengths, slots, own, visible = (one.to(device) for one in arguments)
    workspace = verify_workspace(device)
    found, _ = verify_mla(q, pool, lengths, slots, own, visible, scale=scale, workspace=workspace)
    error = (found.cpu().double() - right.double()).pow(2).mean().sqrt()
    return float(error / right.double().pow(2).mean().sqrt())


def main() -> int:
    """Test every GPU; returns the exit status."""
    try:
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            raise RuntimeError("torch sees no GPU")
        errors = [relative_error_on(index) for index in range(count)]
    except Exception as error:
        print(f"the verify kernel cannot run ({type(error).__name__}: {error})")
        return 1
    worst = max(errors)
    if not worst < LARGEST_ERROR:
        print(
            f"the verify kernel's answer on GPU {errors.index(worst)} is off by {worst:.1e}, "
            f"above {LARGEST_ERROR:.0e}"
        )
        return 1
    print(f"right on {count} GPUs, off by at most {worst:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
