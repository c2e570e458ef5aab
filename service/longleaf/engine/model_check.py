"""Checks of a target's and a drafter's config.json, before anything is loaded.

Each raises DriftError. A field that is of no use to a check may hold anything.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longleaf.engine.drift import DriftError
from longleaf.engine.options import MAX_BLOCK, MAX_NODES

LATENT_DIM, ROPE_DIM = 512, 64
"""The one MLA shape that the kernels are built for."""

_YARN_FIELDS = ("factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What of the server's arguments the configs are held against; None where not given."""

    draft_tokens: int | None = None
    block_size: int | None = None
    draft_window: int | None = None
    page_size: int | None = None
    context_length: int | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None


def read_config(directory: Path, what: str) -> dict[str, Any]:
    """Read the text part of a model's config.json; top-level fields fill what that lacks."""
    path = directory / "config.json"
    try:
        config: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DriftError(
            f"the {what}'s {path} cannot be read ({error})", "give a local directory"
        ) from error
    if not isinstance(config, dict):
        raise DriftError(f"the {what}'s {path} is no JSON object", "give a model's directory")
    return {**config, **_object(config, "text_config", what)}


def _wrong(what: str, name: str, value: object, expected: str) -> DriftError:
    return DriftError(
        f"the {what}'s {name} is {value!r}, not {expected}",
        f"correct {name} in the {what}'s config.json",
    )


def _object(config: Mapping[str, Any], name: str, what: str) -> Mapping[str, Any]:
    """Return the object of that name, empty where there is none."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(what, name, value, "an object")
    return value


def _whole(config: Mapping[str, Any], name: str, what: str) -> int | None:
    """Return the whole number of that name, None where there is none."""
    value = config.get(name)
    if value is None or type(value) is int:
        return value
    raise _wrong(what, name, value, "a whole number")


def _items(config: Mapping[str, Any], name: str, kind: type, what: str) -> list[Any] | None:
    """Return the list of that name and of such items, None where there is none."""
    value = config.get(name)
    if value is None or (isinstance(value, list) and all(type(item) is kind for item in value)):
        return value
    names = {int: "whole numbers", str: "strings"}
    raise _wrong(what, name, value, f"a list of {names[kind]}")


def check_arguments(arguments: Arguments) -> None:
    """Refuse arguments under which a right answer is not possible."""
    if arguments.page_size not in (None, 1):
        raise DriftError(
            f"--page-size is {arguments.page_size}: accepted rows move token by token",
            "--page-size 1",
        )
    if arguments.kv_cache_dtype not in (None, "auto", "bfloat16", "bf16", "fp8_e4m3"):
        raise DriftError(
            f"--kv-cache-dtype is {arguments.kv_cache_dtype}, the kernels read bf16 and fp8_e4m3",
            "--kv-cache-dtype auto or fp8_e4m3",
        )
    if arguments.context_length is not None and arguments.context_length < 1:
        raise DriftError(
            f"--context-length is {arguments.context_length}, it must be at least 1",
            "leave it out for the model's own",
        )


def check_target(target: Mapping[str, Any]) -> None:
    """Check that the target is an MLA model of the kernels' shape."""
    shape = target.get("kv_lora_rank"), target.get("qk_rope_head_dim")
    if shape != (LATENT_DIM, ROPE_DIM):
        raise DriftError(
            f"the target has kv_lora_rank {shape[0]} and qk_rope_head_dim {shape[1]}, the kernels "
            f"are built for {LATENT_DIM} and {ROPE_DIM}",
            "serve a DeepSeek-V3 style model (Kimi K2)",
        )
    for name in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        value = _whole(target, name, "target")
        if value is not None and value < 1:
            raise _wrong("target", name, value, "at least 1")


def check_pair(target: Mapping[str, Any], drafter: Mapping[str, Any], given: Arguments) -> None:
    """Check that the drafter belongs to the target and is run the way it was trained."""
    dflash = _object(drafter, "dflash_config", "drafter")
    for name in ("vocab_size", "hidden_size"):
        if drafter.get(name) != target.get(name):
            raise DriftError(
                f"the drafter's {name} is {drafter.get(name)}, the target's is {target.get(name)}",
                "give the drafter that was trained for this target",
            )
    _check_block(drafter, given)
    _check_taps(target, drafter, dflash)
    mask = _whole(dflash, "mask_token_id", "drafter")
    vocabulary = _whole(target, "vocab_size", "target") or 0
    if mask is None:
        raise DriftError(
            "the drafter's dflash_config has no mask_token_id: SGLang would take the target's mask "
            "token, or add one that the drafter was never trained with",
            "write the id that it was trained with into the drafter's config.json",
        )
    if not 0 <= mask < vocabulary:
        raise DriftError(
            f"the drafter's mask_token_id is {mask}, outside the vocabulary of {vocabulary}",
            "correct dflash_config.mask_token_id",
        )
    _check_window(drafter, given)
    _check_positions(target, drafter, given)


def drafter_block(drafter: Mapping[str, Any]) -> Any:
    """Return the drafter's block_size; an int after `check_pair`."""
    dflash = _object(drafter, "dflash_config", "drafter")
    return dflash.get("block_size", drafter.get("block_size"))


def _check_block(drafter: Mapping[str, Any], given: Arguments) -> None:
    block = drafter_block(drafter)
    if type(block) is not int or block < 2:
        raise DriftError(
            f"the drafter's block_size is {block}, a block has an anchor and at least one draft",
            "correct block_size in the drafter's config.json",
        )
    if block > MAX_BLOCK:
        raise DriftError(
            f"the drafter's block_size is {block}, the tree kernels take blocks of 2 to "
            f"{MAX_BLOCK} tokens",
            "give a drafter of a shorter block",
        )
    if given.block_size not in (None, block):
        raise DriftError(
            f"--speculative-dflash-block-size is {given.block_size}, the drafter's block_size is "
            f"{block}",
            f"leave it out, or give {block}; node counts are --speculative-num-draft-tokens",
        )
    if given.draft_tokens is not None and given.draft_tokens < 1:
        raise DriftError(
            f"--speculative-num-draft-tokens is {given.draft_tokens}, a tree has at least its root",
            "--speculative-num-draft-tokens 32",
        )
    if given.draft_tokens is not None and given.draft_tokens > MAX_NODES:
        raise DriftError(
            f"--speculative-num-draft-tokens is {given.draft_tokens}, a tree has at most "
            f"{MAX_NODES} nodes",
            f"give at most {MAX_NODES}",
        )


def _check_taps(
    target: Mapping[str, Any], drafter: Mapping[str, Any], dflash: Mapping[str, Any]
) -> None:
    layers = _whole(target, "num_hidden_layers", "target") or 0
    trained = dflash.get("num_target_layers", drafter.get("num_target_layers"))
    if trained is not None and trained != layers:
        raise DriftError(
            f"the drafter's num_target_layers is {trained}, the target has {layers}",
            "give the drafter that was trained for this target",
        )
    holder = dflash if "target_layer_ids" in dflash else drafter
    taps = _items(holder, "target_layer_ids", int, "drafter")
    if taps is None:
        return
    if not taps or min(taps) < 0 or max(taps) > layers - 2:
        raise DriftError(
            f"the drafter's target_layer_ids are {taps}, SGLang captures layers 0 to {layers - 2} "
            f"of {layers}",
            "give the drafter that was trained for this target",
        )
    if taps != sorted(set(taps)):
        raise DriftError(
            f"the drafter's target_layer_ids are {taps}: SGLang captures each layer once, and "
            "concatenates them in the target's order",
            "give a drafter with ascending target_layer_ids",
        )


def _check_window(drafter: Mapping[str, Any], given: Arguments) -> None:
    kinds = _items(drafter, "layer_types", str, "drafter")
    if kinds is not None and len(kinds) != drafter.get("num_hidden_layers"):
        raise DriftError(
            f"the drafter has {drafter.get('num_hidden_layers')} layers and {len(kinds)} "
            "layer_types",
            "correct layer_types in the drafter's config.json",
        )
    if "sliding_attention" not in (kinds or ()):
        return
    window = drafter.get("sliding_window")
    if type(window) is not int or window < 1:
        raise DriftError(
            f"the drafter has sliding layers and sliding_window is {window}",
            "correct sliding_window in the drafter's config.json",
        )
    if given.draft_window is not None and given.draft_window < window:
        raise DriftError(
            f"--speculative-draft-window-size is {given.draft_window}, below the window of "
            f"{window} that the drafter was trained with",
            f"leave it out, or give at least {window}",
        )


def _check_positions(
    target: Mapping[str, Any], drafter: Mapping[str, Any], given: Arguments
) -> None:
    positions = _whole(drafter, "max_position_embeddings", "drafter") or 0
    for name, scaling in _rope(drafter):
        if scaling.get("rope_type", scaling.get("type")) == "yarn":
            _check_yarn(name, scaling, positions)
    longest = given.context_length or _whole(target, "max_position_embeddings", "target") or 0
    if positions and positions < longest:
        raise DriftError(
            f"the drafter has {positions} positions, the context length is {longest}",
            f"--context-length {positions}",
        )


def _rope(drafter: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the drafter's RoPE parameters with their names: one set, or one a kind of layer.

    transformers 5 calls rope_scaling rope_parameters, and may hold there a set for each of
    layer_types.
    """
    name = "rope_parameters" if drafter.get("rope_scaling") is None else "rope_scaling"
    found = _object(drafter, name, "drafter")
    kinds = [kind for kind, value in found.items() if isinstance(value, Mapping)]
    return [(f"{name}.{kind}", found[kind]) for kind in kinds] or [(name, found)]


def _check_yarn(name: str, scaling: Mapping[str, Any], positions: int) -> None:
    for field in _YARN_FIELDS:
        value = scaling.get(field)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not good or value == math.inf:
            raise DriftError(
                f"the drafter's YaRN has {field} {value}",
                f"correct {name}.{field} in the drafter's config.json",
            )
    reach = int(scaling["factor"] * scaling["original_max_position_embeddings"])
    if positions > reach:
        raise DriftError(
            f"the drafter's YaRN reaches {reach} positions (factor times original), its "
            f"max_position_embeddings is {positions}",
            f"correct {name} in the drafter's config.json",
        )
