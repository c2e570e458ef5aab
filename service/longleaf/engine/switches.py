"""SGLang's switches that a verify of ours or a tree step breaks: one table, each with why."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from longleaf.engine.drift import DriftError

BACKEND = "longleaf_mla"
ALGORITHM = "DDTREE"
VERIFIED_ALGORITHMS = ("DDTREE", "DFLASH", "NGRAM")
"""Algorithms whose verifies the backend can read: the others' trees come in forms of their own."""


class Switch(NamedTuple):
    """An argument that is refused. asked: of an object with the fields of SGLang's ServerArgs."""

    argument: str
    asked: Callable[[Any], object]
    why: str
    fix: str


def _value(name: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, name)


def _above(name: str, most: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name) or 0) > most


def _other_than(name: str, *values: object) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name) not in values


def _without(argument: str) -> str:
    return f"start without {argument}"


BESIDE_BACKEND = (
    Switch(
        "--prefill-attention-backend",
        _other_than("prefill_attention_backend", None, BACKEND),
        "SGLang would give it the verifies, and it reads no tree",
        f"leave it out, or give {BACKEND}",
    ),
    Switch(
        "--decode-attention-backend",
        _other_than("decode_attention_backend", None, BACKEND),
        "SGLang would give it decodes or verifies, and it reads no tree",
        f"leave it out, or give {BACKEND}",
    ),
    Switch(
        "--attention-backend",
        _other_than("attention_backend", BACKEND),
        f"SGLang makes one kernel serve every pass only where it is {BACKEND} too",
        f"--attention-backend {BACKEND}",
    ),
    Switch(
        "--speculative-algorithm",
        lambda args: (args.speculative_algorithm or ALGORITHM).upper() not in VERIFIED_ALGORITHMS,
        f"{BACKEND} verifies {', '.join(VERIFIED_ALGORITHMS)}",
        f"--speculative-algorithm {ALGORITHM}",
    ),
    Switch(
        "--speculative-draft-attention-backend",
        lambda args: args.speculative_draft_attention_backend == BACKEND,
        f"{BACKEND} serves the target alone: the drafter has no latent cache",
        "--speculative-draft-attention-backend triton",
    ),
    Switch(
        "--dtype",
        _other_than("dtype", "auto", "bfloat16"),
        f"{BACKEND} computes in bfloat16",
        "--dtype bfloat16",
    ),
    Switch(
        "--enable-two-batch-overlap",
        _value("enable_two_batch_overlap"),
        f"{BACKEND} prepares one batch a pass",
        _without("--enable-two-batch-overlap"),
    ),
    Switch(
        "--enable-pdmux",
        _value("enable_pdmux"),
        f"{BACKEND}'s buffers belong to one stream",
        _without("--enable-pdmux"),
    ),
    Switch(
        "--dcp-size",
        _above("dcp_size", 1),
        f"{BACKEND} reads whole prefixes, not one rank's part",
        "--dcp-size 1",
    ),
    Switch(
        "--attn-cp-size",
        _above("attn_cp_size", 1),
        f"{BACKEND} extends whole prompts, not one rank's part",
        "--attn-cp-size 1",
    ),
    Switch(
        "--enable-unified-memory",
        _value("enable_unified_memory"),
        f"{BACKEND} reads slots of the pool, not virtual ones",
        _without("--enable-unified-memory"),
    ),
)
"""What the attention backend does not serve, with or without speculation."""

BESIDE_TREES = (
    Switch(
        "--pp-size",
        _above("pp_size", 1),
        "a step's tree is not carried between pipeline stages",
        "--pp-size 1, and --tp-size for more GPUs",
    ),
    Switch(
        "--enable-dp-attention",
        _value("enable_dp_attention"),
        "ranks that attend alone would choose different node counts",
        _without("--enable-dp-attention"),
    ),
    Switch(
        "--enable-lora",
        lambda args: args.enable_lora or args.lora_paths,
        "SGLang applies adapters beside NGRAM alone, and a drafter was trained without them",
        _without("--enable-lora and --lora-paths"),
    ),
    Switch(
        "--enable-multi-layer-eagle",
        _value("enable_multi_layer_eagle"),
        "SGLang would look for that algorithm's list of drafters",
        _without("--enable-multi-layer-eagle"),
    ),
    Switch(
        "--disaggregation-mode",
        _other_than("disaggregation_mode", None, "null"),
        "SGLang hands the decode server no state to draft from",
        "--disaggregation-mode null",
    ),
    Switch(
        "--enable-lmcache",
        _value("enable_lmcache"),
        "it brings back the target's rows and not the drafter's, which then drafts from stale ones",
        "--enable-hierarchical-cache, which keeps both",
    ),
    Switch(
        "--enable-flexkv",
        _value("enable_flexkv"),
        "it brings back the target's rows and not the drafter's, which then drafts from stale ones",
        "--enable-hierarchical-cache, which keeps both",
    ),
    Switch(
        "--enable-return-routed-experts",
        _value("enable_return_routed_experts"),
        "SGLang keeps them by slot, and accepted nodes move to other slots",
        _without("--enable-return-routed-experts"),
    ),
    Switch(
        "--enable-return-indexer-topk",
        _value("enable_return_indexer_topk"),
        "SGLang keeps it by slot, and accepted nodes move to other slots",
        _without("--enable-return-indexer-topk"),
    ),
    Switch(
        "--speculative-accept-threshold-single",
        _other_than("speculative_accept_threshold_single", None, 1.0),
        "DDTREE accepts what keeps the target's distribution, and nothing else",
        _without("--speculative-accept-threshold-single"),
    ),
    Switch(
        "--speculative-accept-threshold-acc",
        _other_than("speculative_accept_threshold_acc", None, 1.0),
        "DDTREE accepts what keeps the target's distribution, and nothing else",
        _without("--speculative-accept-threshold-acc"),
    ),
)
"""What a tree step, or an extend that runs as a chain, would do wrongly or ignore."""


AT_LAUNCH = (
    Switch(
        "--port",
        lambda args: not 1 <= args.port <= 65535,
        "a server that can be asked has a port from 1 to 65535",
        "--port 30000",
    ),
    Switch(
        "--skip-tokenizer-init",
        _value("skip_tokenizer_init"),
        "the launcher warms the server up with text",
        _without("--skip-tokenizer-init"),
    ),
    Switch(
        "--is-embedding",
        _value("is_embedding"),
        "the launcher warms the server up by generating",
        _without("--is-embedding"),
    ),
    Switch(
        "--smg-grpc-mode",
        _value("smg_grpc_mode"),
        "the launcher warms the server up over HTTP",
        _without("--smg-grpc-mode"),
    ),
    Switch(
        "--grpc-mode",
        _value("grpc_mode"),
        "the launcher warms the server up over HTTP",
        _without("--grpc-mode"),
    ),
    Switch(
        "--node-rank",
        _above("node_rank", 0),
        "only the first node answers requests, so the others are never ready",
        "on this node start python -m sglang.launch_server",
    ),
)
"""What ``longleaf engine`` cannot start, whatever the backend."""


def ours(args: Any) -> bool:
    """Whether backend or algorithm is ours."""
    return wants_backend(args) or wants_trees(args)


def wants_backend(args: Any) -> bool:
    """Whether any of the three backend arguments names ours."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return BACKEND in (getattr(args, name) for name in names)


def wants_trees(args: Any) -> bool:
    """Whether the algorithm is DDTREE."""
    return (args.speculative_algorithm or "").upper() == ALGORITHM


def refuse(args: Any) -> None:
    """Raise DriftError for the first switch that ours cannot run with."""
    switches: Iterable[Switch] = BESIDE_BACKEND if wants_backend(args) else ()
    if wants_trees(args):
        if not wants_backend(args):
            raise DriftError(
                f"{ALGORITHM} runs on the attention backend {BACKEND}, --attention-backend is "
                f"{args.attention_backend}",
                f"--attention-backend {BACKEND}",
            )
        switches = (*switches, *BESIDE_TREES)
    _refuse(args, switches)


def refuse_at_launch(args: Any) -> None:
    """Raise DriftError for the first switch under which the launcher would wait in vain."""
    _refuse(args, AT_LAUNCH)


def _refuse(args: Any, switches: Iterable[Switch]) -> None:
    for switch in switches:
        if switch.asked(args):
            name = switch.argument.removeprefix("--").replace("-", "_")
            raise DriftError(
                f"{switch.argument} is {getattr(args, name)}: {switch.why}", switch.fix
            )
