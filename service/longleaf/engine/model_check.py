"""Checks of a target's and a drafter's config.json, before anything is loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longleaf.engine.drift import DriftError

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
    except (OSError, json.JSONDecodeError) as error:
        raise DriftError(
            f"the {what}'s {path} cannot be read ({error})", "give a local directory"
        ) from error
    if not isinstance(config, dict):
        raise DriftError(f"the {what}'s {path} is no JSON object", "give a model's directory")
    return {**config, **(config.get("text_config") or {})}


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


def check_target(target: Mapping[str, Any]) -> None:
    """Check that the target is an MLA model of the kernels' shape."""
    shape = target.get("kv_lora_rank"), target.get("qk_rope_head_dim")
    if shape != (LATENT_DIM, ROPE_DIM):
        raise DriftError(
            f"the target has kv_lora_rank {shape[0]} and qk_rope_head_dim {shape[1]}, the kernels "
            f"are built for {LATENT_DIM} and {ROPE_DIM}",
            "serve a DeepSeek-V3 style model (Kimi K2)",
        )


def check_pair(target: Mapping[str, Any], drafter: Mapping[str, Any], given: Arguments) -> None:
    """Check that the drafter belongs to the target and is run the way it was trained."""
    dflash = drafter.get("dflash_config") or {}
    for name in ("vocab_size", "hidden_size"):
        if drafter.get(name) != target.get(name):
            raise DriftError(
                f"the drafter's {name} is {drafter.get(name)}, the target's is {target.get(name)}",
                "give the drafter that was trained for this target",
            )
    _check_block(drafter, dflash, given)
    _check_taps(target, drafter, dflash)
    mask, vocabulary = dflash.get("mask_token_id"), int(target.get("vocab_size") or 0)
    if mask is not None and not 0 <= mask < vocabulary:
        raise DriftError(
            f"the drafter's mask_token_id is {mask}, outside the vocabulary of {vocabulary}",
            "correct dflash_config.mask_token_id",
        )
    _check_window(drafter, given)
    _check_positions(target, drafter, given)


def _check_block(drafter: Mapping[str, Any], dflash: Mapping[str, Any], given: Arguments) -> None:
    block = dflash.get("block_size", drafter.get("block_size"))
    if not isinstance(block, int) or block < 2:
        raise DriftError(
            f"the drafter's block_size is {block}, a block has an anchor and at least one draft",
            "correct block_size in the drafter's config.json",
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


def _check_taps(
    target: Mapping[str, Any], drafter: Mapping[str, Any], dflash: Mapping[str, Any]
) -> None:
    layers = int(target.get("num_hidden_layers") or 0)
    trained = dflash.get("num_target_layers", drafter.get("num_target_layers"))
    if trained is not None and trained != layers:
        raise DriftError(
            f"the drafter's num_target_layers is {trained}, the target has {layers}",
            "give the drafter that was trained for this target",
        )
    taps = dflash.get("target_layer_ids", drafter.get("target_layer_ids"))
    if taps is None:
        return
    if not taps or min(taps) < 0 or max(taps) > layers - 2:
        raise DriftError(
            f"the drafter's target_layer_ids are {taps}, SGLang captures layers 0 to {layers - 2} "
            f"of {layers}",
            "give the drafter that was trained for this target",
        )


def _check_window(drafter: Mapping[str, Any], given: Arguments) -> None:
    kinds = drafter.get("layer_types")
    if kinds is not None and len(kinds) != drafter.get("num_hidden_layers"):
        raise DriftError(
            f"the drafter has {drafter.get('num_hidden_layers')} layers and {len(kinds)} "
            "layer_types",
            "correct layer_types in the drafter's config.json",
        )
    if "sliding_attention" not in (kinds or ()):
        return
    window = drafter.get("sliding_window")
    if not isinstance(window, int) or window < 1:
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
    scaling = drafter.get("rope_scaling") or {}
    positions = int(drafter.get("max_position_embeddings") or 0)
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        for name in _YARN_FIELDS:
            value = scaling.get(name)
            if not isinstance(value, int | float) or value <= 0:
                raise DriftError(
                    f"the drafter's YaRN has {name} {value}",
                    f"correct rope_scaling.{name} in the drafter's config.json",
                )
        reach = int(scaling["factor"] * scaling["original_max_position_embeddings"])
        if positions > reach:
            raise DriftError(
                f"the drafter's YaRN reaches {reach} positions (factor times original), its "
                f"max_position_embeddings is {positions}",
                "correct rope_scaling in the drafter's config.json",
            )
    longest = given.context_length or int(target.get("max_position_embeddings") or 0)
    if positions and positions < longest:
        raise DriftError(
            f"the drafter has {positions} positions, the context length is {longest}",
            f"--context-length {positions}",
        )
