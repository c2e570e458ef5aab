"""Checks of GPUs, driver and memory."""

import re

from longleaf.probes.preflight.expected import Expected
from longleaf.probes.preflight.facts import Facts, Gpu
from longleaf.probes.preflight.verdict import CheckError, NotAskedError

GIB = 1 << 30


def _gpus(facts: Facts) -> tuple[Gpu, ...]:
    if facts.gpu_error is not None:
        raise NotAskedError(f"no GPU is known: {facts.gpu_error}")
    return facts.gpus


def check_count(facts: Facts, expected: Expected) -> str:
    """As many GPUs as ranks."""
    if facts.gpu_error is not None:
        raise CheckError(
            f"the GPUs cannot be listed: {facts.gpu_error}",
            "run on a node with NVIDIA's driver and container runtime (runtimeClassName: nvidia)",
        )
    if len(facts.gpus) != expected.gpus:
        raise CheckError(
            f"the pod sees {len(facts.gpus)} GPUs, the engine runs on {expected.gpus}",
            f"ask for nvidia.com/gpu: {expected.gpus} on a node that has them all healthy",
        )
    return f"{len(facts.gpus)} GPUs"


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def check_product(facts: Facts, expected: Expected) -> str:
    """Every GPU is one of the products, and all are of one kind."""
    names = sorted({gpu.name for gpu in _gpus(facts)})
    allowed = {_normalized(name) for name in expected.products}
    wrong = [name for name in names if _normalized(name) not in allowed]
    if not expected.products:
        raise NotAskedError("no --product is given")
    if wrong:
        raise CheckError(
            f"the GPU is a {wrong[0]}, which the engine was not measured on",
            "add it to engine.gpuProducts, or pick nodes by nvidia.com/gpu.product",
        )
    if len(names) > 1:
        raise CheckError(
            f"the GPUs differ: {', '.join(names)}",
            "give the pod GPUs of one product: the slowest rank sets the pace",
        )
    return ", ".join(names) or "none"


def check_capability(facts: Facts, expected: Expected) -> str:
    """Every GPU is of a compute capability that the kernels are built for."""
    if not expected.compute_majors:
        raise NotAskedError("no --compute-major is given")
    for gpu in _gpus(facts):
        if gpu.capability is None or gpu.capability[0] not in expected.compute_majors:
            found = "unknown" if gpu.capability is None else "{}.{}".format(*gpu.capability)
            wanted = " or ".join(str(major) for major in expected.compute_majors)
            raise CheckError(
                f"GPU {gpu.index} has compute capability {found}, the kernels need {wanted}.x",
                "pick nodes by nvidia.com/gpu.compute.major, or build the kernels for this GPU",
            )
    return ", ".join(sorted({"{}.{}".format(*gpu.capability or (0, 0)) for gpu in facts.gpus}))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def check_driver(facts: Facts, expected: Expected) -> str:
    """The driver is new enough for the CUDA of the image."""
    if expected.minimum_driver is None:
        raise NotAskedError("no --minimum-driver is given")
    for gpu in _gpus(facts):
        if _version(gpu.driver) < _version(expected.minimum_driver):
            raise CheckError(
                f"the driver is {gpu.driver}, CUDA 13.0 needs {expected.minimum_driver}",
                f"install driver {expected.minimum_driver} or newer on the node",
            )
    return ", ".join(sorted({gpu.driver for gpu in facts.gpus}))


def check_shared_memory(facts: Facts, expected: Expected) -> str:
    """/dev/shm holds what NCCL and the ranks exchange."""
    if expected.shared_memory is None:
        raise NotAskedError("no --shared-memory is given")
    found = facts.shared_memory or 0
    if found < expected.shared_memory:
        raise CheckError(
            f"/dev/shm has {found / GIB:.2f} GiB, {expected.shared_memory / GIB:.2f} GiB are asked "
            "for (64 MiB, a runtime's default, breaks NCCL)",
            "mount a Memory emptyDir at /dev/shm with that sizeLimit (engine.sharedMemory)",
        )
    return f"{found / GIB:.1f} GiB"
