"""One rank of an all-reduce with a known sum: ``python -m longleaf.engine.preflight_nccl``.

Arguments: rank, ranks, a file to meet at, and the backend (nccl; gloo runs on a CPU). The caller
starts every rank and stops them when they take too long: a hung collective cannot be ended from
inside.
"""

import sys
import time

ELEMENTS = 4 << 20
"""16 MiB of float32: long enough for every transport that NCCL would take for prefill."""
ROUNDS = 5


def main(argv: list[str]) -> int:
    """Reduce, check the sum, print the time of a round; returns the exit status."""
    import torch
    import torch.distributed as dist

    rank, ranks, meeting, backend = int(argv[0]), int(argv[1]), argv[2], argv[3]
    cuda = backend == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        begin = time.perf_counter()
        for number in range(1, ROUNDS + 1):
            values = torch.full((ELEMENTS,), float(number * (rank + 1)))
            values = values.cuda() if cuda else values
            dist.all_reduce(values)
            right = number * ranks * (ranks + 1) / 2
            wrong = int((values != right).sum())
            if wrong:
                print(f"rank {rank}: {wrong} of {ELEMENTS} sums are not {right:.0f}")
                return 1
        seconds = (time.perf_counter() - begin) / ROUNDS
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(f"right over {ranks} ranks, {1000 * seconds:.1f} ms a round of 16 MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
