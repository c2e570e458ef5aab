"""The speculative algorithm DDTREE, as SGLang's registry takes it."""

import json
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from longleaf.engine import switches
from longleaf.engine.drift import DriftError
from longleaf.engine.options import (
    ENGINE_VARIABLE,
    MAX_BLOCK,
    MAX_NODES,
    captured_nodes,
    engine_options,
)

NAME = switches.ALGORITHM


class DDTreeAlgorithm(CustomSpecAlgo):
    """DDTREE: a DFlash drafter, whose marginals become a tree that the target verifies.

    To the rest of SGLang it is of the DFLASH family (aux hidden states, KV sizes, graphs,
    overlap), with two widths: the drafter's block F and the target's node count.
    --speculative-num-draft-tokens is the widest node count or F, whichever is more: it is what
    KV slots are reserved by. F travels between processes as --speculative-dflash-block-size.
    """

    def is_dflash(self) -> bool:
        """Take DFLASH's branches."""
        return True

    def is_dflash_family(self) -> bool:
        """Take DFLASH's branches."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The draft block is one verify forward of the draft model."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """The worker advances the grammars after it has launched the verify forward."""
        return True

    def need_topk(self) -> bool:
        """No top-k of one step is carried to the next."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """No hidden states are carried from prefill to decode servers."""
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """Return SGLang's own map of what one step leaves to the next."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Return rows a request: the block for the drafter, the nodes given for the target."""
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_dflash_block_size)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what DDTREE needs and refuse what it cannot do. Runs once, before any start.

        Raises DriftError or, where SGLang's own checks of DFLASH refuse, ValueError.
        """
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

        if server_args.speculative_draft_model_path is None:
            raise DriftError("DDTREE needs a drafter", "--speculative-draft-model-path DIRECTORY")
        switches.refuse(server_args)
        given = server_args.speculative_dflash_block_size
        block = drafter_block(server_args) if given is None else int(given)
        nodes = planned_nodes(
            block, server_args.speculative_num_draft_tokens, server_args.page_size
        )
        server_args.speculative_dflash_block_size = None
        server_args.speculative_num_draft_tokens = max(block, *nodes)
        # A cached property, should anything have read it before.
        vars(server_args).pop("max_speculative_num_draft_tokens", None)
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = "triton"
        if (Phase.PREFILL, "backend") not in server_args._cuda_graph_config_locked:
            # SGLang's default for Kimi's architecture; it has settled its graphs before this hook.
            server_args.cuda_graph_config.prefill.backend = Backend.DISABLED
        _handle_dflash(server_args)
        server_args.speculative_dflash_block_size = block


def planned_nodes(block: int, widest: int | None, page_size: int | None) -> tuple[int, ...]:
    """Return the node counts to capture, by the process's options and the server's arguments.

    block: the drafter's. widest: --speculative-num-draft-tokens, if given. Raises DriftError for
    what contradicts itself and for sizes that DDTREE cannot run.
    """
    try:
        options = engine_options()
        nodes = captured_nodes(options, widest)
    except ValueError as error:
        raise DriftError(str(error), f"correct {ENGINE_VARIABLE}") from error
    if widest is not None and widest < block and not options.nodes:
        raise DriftError(
            f"--speculative-num-draft-tokens {widest} is below the drafter's block of {block}",
            f"to verify fewer nodes, set {ENGINE_VARIABLE}='{{\"nodes\": [{widest}]}}'",
        )
    if not 2 <= block <= MAX_BLOCK:
        raise DriftError(
            f"DDTREE takes draft blocks of 2 to {MAX_BLOCK} tokens, the drafter's is {block}",
            "give a drafter of such a block",
        )
    if max(nodes) > MAX_NODES:
        raise DriftError(
            f"DDTREE takes at most {MAX_NODES} nodes, got {max(nodes)}",
            f"--speculative-num-draft-tokens {MAX_NODES}",
        )
    if page_size not in (None, 1):
        raise DriftError(
            f"DDTREE needs --page-size 1, got {page_size}: accepted rows move token by token",
            "--page-size 1",
        )
    return nodes


def drafter_block(server_args: Any) -> int:
    """Read the block size from the drafter's configuration; raises ValueError if it has none."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    if block is None:
        raise ValueError(
            f"the drafter {server_args.speculative_draft_model_path} states no block size; "
            "give --speculative-dflash-block-size"
        )
    return int(block)


def _worker_class(server_args: Any) -> Any:
    from longleaf.engine.worker import DDTreeWorker

    return DDTreeWorker


def register() -> DDTreeAlgorithm:
    """Register DDTREE with SGLang, once; returns what SGLang now finds under the name."""
    from sglang.srt.speculative.spec_registry import get_spec

    found = get_spec(NAME)
    if found is None:
        take = SpeculativeAlgorithm.register(
            NAME, supports_overlap=True, spec_class=DDTreeAlgorithm
        )
        take(_worker_class)
        found = get_spec(NAME)
    if not isinstance(found, DDTreeAlgorithm):
        raise TypeError(f"SGLang has another algorithm named {NAME}: {found!r}")
    return found
