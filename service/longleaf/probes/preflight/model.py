"""Checks of the model's files, and whether they fit into the GPUs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longleaf.engine import model_check
from longleaf.engine.drift import DriftError
from longleaf.probes.preflight.expected import Expected
from longleaf.probes.preflight.facts import Facts
from longleaf.probes.preflight.machine import GIB
from longleaf.probes.preflight.verdict import CheckError, NotAskedError
from longleaf.probes.preflight.weights import weight_files


def _arguments(expected: Expected) -> model_check.Arguments:
    return model_check.Arguments(
        draft_tokens=expected.nodes,
        block_size=expected.block_size,
        draft_window=expected.draft_window,
        context_length=expected.context_length,
        kv_cache_dtype=expected.kv_cache_dtype,
    )


def _config(directory: Path | None, what: str) -> Mapping[str, Any]:
    if directory is None:
        raise NotAskedError(f"no --{what} is given")
    try:
        return model_check.read_config(directory, what)
    except DriftError as error:
        fix = f"put the {what}'s files there: a claim, a directory of the node, or model.download"
        raise CheckError(error.sentence, fix) from error


def check_target(_facts: Facts, expected: Expected) -> str:
    """The target's files are there, and its shape is the kernels'."""
    target = _config(expected.target, "target")
    assert expected.target is not None
    try:
        model_check.check_arguments(_arguments(expected))
        model_check.check_target(target)
    except DriftError as error:
        raise CheckError(error.sentence, error.fix) from error
    longest = target.get("max_position_embeddings")
    if expected.context_length and longest and expected.context_length > int(longest):
        raise CheckError(
            f"the context length is {expected.context_length}, the target has {longest} positions",
            f"engine.contextLength: {longest}",
        )
    size = weight_files(expected.target, "target")
    return f"{target.get('num_hidden_layers')} layers, {size / GIB:.1f} GiB"


def check_drafter(_facts: Facts, expected: Expected) -> str:
    """The drafter is there and belongs to the target: block, window, YaRN, vocabulary."""
    drafter = _config(expected.drafter, "drafter")
    target = _config(expected.target, "target")
    assert expected.drafter is not None
    try:
        model_check.check_pair(target, drafter, _arguments(expected))
    except DriftError as error:
        raise CheckError(error.sentence, error.fix) from error
    size = weight_files(expected.drafter, "drafter")
    return f"{drafter.get('num_hidden_layers')} layers, {size / GIB:.1f} GiB"


def pool_bytes_per_token(
    target: Mapping[str, Any], drafter: Mapping[str, Any] | None, ranks: int, dtype: str
) -> int:
    """Bytes of the KV pool that a token takes on each GPU.

    The latent rows are on every rank; the drafter's heads are divided among them.
    """
    row = int(target["kv_lora_rank"]) + int(target["qk_rope_head_dim"])
    size = int(target["num_hidden_layers"]) * row * (1 if dtype == "fp8_e4m3" else 2)
    if drafter is not None:
        heads = max(1, int(drafter["num_key_value_heads"]) // ranks)
        wide = int(drafter.get("head_dim") or 128)
        size += int(drafter["num_hidden_layers"]) * 2 * heads * wide * 2
    return size


def check_memory(facts: Facts, expected: Expected) -> str:
    """Weights and KV pool fit into the free memory of every GPU."""
    if facts.gpu_error is not None or not facts.gpus:
        raise NotAskedError(f"no GPU is known: {facts.gpu_error}")
    if expected.kv_pool_tokens is None:
        raise NotAskedError("no --kv-pool-tokens is given")
    target = _config(expected.target, "target")
    assert expected.target is not None
    weights = weight_files(expected.target, "target")
    drafter = None
    if expected.drafter is not None:
        drafter = _config(expected.drafter, "drafter")
        weights += weight_files(expected.drafter, "drafter")
    try:
        token = pool_bytes_per_token(target, drafter, expected.gpus, expected.kv_cache_dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise NotAskedError(f"a config.json does not tell the size of a row ({error})") from error
    share, pool = weights / expected.gpus, expected.kv_pool_tokens * token
    need = share + pool
    for gpu in facts.gpus:
        if gpu.memory_free is None:
            raise NotAskedError(f"GPU {gpu.index} tells no free memory")
        room = gpu.memory_free * expected.memory_fraction
        if need > room:
            fits = max(0, int((room - share) / token))
            used = (gpu.memory_total or gpu.memory_free) - gpu.memory_free
            busy = used > 2 * GIB
            raise CheckError(
                f"GPU {gpu.index} has {gpu.memory_free / GIB:.1f} GiB free, of which the engine "
                f"may take {room / GIB:.1f}; weights take {share / GIB:.1f} and a KV pool of "
                f"{expected.kv_pool_tokens} tokens {pool / GIB:.1f}",
                f"end what holds {used / GIB:.1f} GiB of that GPU"
                if busy
                else f"engine.kvPoolTokens: {fits}, or kvCacheDtype: fp8_e4m3",
            )
    return f"{need / GIB:.1f} GiB a GPU: weights {share / GIB:.1f}, KV pool {pool / GIB:.1f}"
