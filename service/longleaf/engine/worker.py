"""The DDTREE worker: SGLang's DFLASH worker with a tree in place of the chain."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.kernels.ops.speculative.dflash import _prepare_dflash_draft_block_unchecked
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult, _async_d2h
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, build_grammar_vocab_mask
from torch import Tensor

from longleaf.engine.accept import Acceptor, Committed, add_logprobs, committed, grammar_tree
from longleaf.engine.annotate import annotated
from longleaf.engine.backend import LongleafMlaBackend
from longleaf.engine.compaction import TargetCompactor
from longleaf.engine.draft_head import DraftMarginals, MarginalHead, head_shard
from longleaf.engine.metrics import EngineObserver, PhaseClock, StepLedger, StepRecord
from longleaf.engine.options import captured_nodes, engine_options
from longleaf.engine.penalties import Penalties
from longleaf.engine.short_extend import ShortExtends, extend_positions
from longleaf.engine.verify_input import RootTrees, verify_input
from longleaf.engine.widths import VerifyRunners, WidthPolicy, make_budget, spec_width
from longleaf_kernels._tree import DraftTrees
from longleaf_kernels.eager import expand_tree

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """Drafts a block of F tokens, verifies a tree of Q nodes, commits its longest accepted path.

    Prefill and idle steps are DFLASH's; a prefill of few new tokens is a chain in a verify graph
    (`short_extend`). A decode step, all of it queued on the forward stream
    and none of it waited for:

    - draft: block of F rows through the drafter's own graph, whose tail leaves marginals;
    - build: the tree of Q nodes, from marginals that are the same on every rank;
    - verify: Q rows a request through the target's graph for Q, with visibility bits;
    - accept: the path, by request greedy or sampled; the scheduler gets the new lengths here;
    - compact: accepted rows of the target's KV to the front, and the path's tapped hidden
      states, no others, into the draft KV.

    Slots: node i of a step lies in the request's slot prefix + i; the draft block takes the first
    F of the same slot ids in the draft pool. `speculative_num_draft_tokens` of the server is the
    larger of F and the widest Q, so what SGLang reserves covers both. Results come with a stride
    of F, the longest path there is.
    """

    def __init__(
        self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
    ) -> None:
        if SIMULATE_ACC_LEN > 0:
            raise ValueError("DDTREE does not simulate acceptance: unset SGLANG_SIMULATE_ACC_LEN")
        self._options = engine_options()
        self._reserved = int(server_args.speculative_num_draft_tokens)
        self._nodes = captured_nodes(self._options, self._reserved)
        block = int(server_args.speculative_dflash_block_size)
        super().__init__(
            server_args=_with_width(server_args, block),
            gpu_id=gpu_id,
            ps=ps,
            nccl_port=nccl_port,
            target_worker=target_worker,
        )
        self.server_args = server_args
        budget = make_budget(
            self._nodes,
            block - 1,
            int(self.model_runner.model_config.num_hidden_layers),
            self._options.step_ms,
        )
        self._policy = WidthPolicy(self._nodes, self._options.grammar_nodes, budget)
        self._runners = VerifyRunners(self.model_runner)
        self._clock = PhaseClock(self._options.sample_phases)
        self._ledger = StepLedger()
        self._compactor = TargetCompactor()
        self._observer: EngineObserver | None = None
        if ps.tp_rank == 0:
            logger.info(
                "DDTREE: block %d, nodes %s, draft window %s",
                block,
                self._nodes,
                self.draft_window_size,
            )

    def init_attention_backends(self) -> None:
        """Let the drafter's backend be made for blocks, not for trees."""
        with spec_width(int(self.block_size), self._reserved):
            super().init_attention_backends()
        if self._need_mamba_verify_commit:
            raise ValueError("DDTREE takes no target with Mamba layers: their state is no tree")

    def init_cuda_graphs(self) -> None:
        """Capture the draft graph with the marginals in its tail, and a verify graph a width."""
        if not isinstance(self.model_runner.attn_backend, LongleafMlaBackend):
            kind = type(self.model_runner.attn_backend).__name__
            raise ValueError(f"DDTREE verifies on longleaf_mla alone, the target has {kind}")
        batch = self._max_batch()
        device = self.device
        group = get_tp_group()
        shard = head_shard(getattr(self.model_runner.model, "lm_head", None), int(group.world_size))
        widest = max(self._nodes)
        self._head = MarginalHead(
            shard,
            int(self.block_size),
            max(1, widest - 1),
            batch,
            group if group.world_size > 1 else None,
        )
        seed = int(self.server_args.random_seed or 0) + self._options.sampling_seed
        self._acceptor = Acceptor(batch, widest, seed, device)
        self._roots = RootTrees(batch, device)
        table = self.model_runner.req_to_token_pool.req_to_token
        self._penalties = Penalties(table.shape[0], int(self.block_size), device)
        with spec_width(int(self.block_size), self._reserved):
            super().init_cuda_graphs()
        graphs = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        self._runners.build(self._nodes, self._reserved, graphs)
        if graphs:
            self.model_runner.prefill_cuda_graph_runner = ShortExtends(
                self.model_runner, self._runners
            )
        if self.server_args.enable_metrics and self.ps.tp_rank == 0:
            self._observer = self._make_observer()

    def _maybe_build_draft_sampler(self) -> MarginalHead:
        """Called by DFLASH before it captures the draft graph: the tail hook's callable."""
        return self._head

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Every backend that a step touches."""
        return (
            self.model_runner.attn_backend,
            *self._runners.attn_backends,
            self.draft_model_runner.attn_backend,
        )

    def _max_batch(self) -> int:
        config = get_exec().graph.cuda_graph_config.decode
        if config.backend == Backend.DISABLED or not config.bs:
            return 1
        return int(max(config.bs))

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> Any:
        """Run one step of a batch."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish=on_publish)
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            raise RuntimeError(
                f"DDTREE expected what the step before left, got {type(batch.spec_info).__name__}"
            )
        with torch.no_grad():
            return self._decode(batch, batch.spec_info, on_publish, grammar_barrier)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Learn from a step's accepted lengths: called once a decode result, on every rank."""
        record = self._ledger.settle(len(num_correct_drafts_per_req))
        if record is None:
            return
        rows, paths = record.committing(), record.paths()
        if rows:
            self._policy.observe(
                record.nodes,
                [num_correct_drafts_per_req[row] for row in rows],
                paths and [paths[row] for row in rows],
            )
        if self._observer is not None:
            free = self.model_runner.token_to_kv_pool_allocator.available_size()
            self._observer.observe(record, num_correct_drafts_per_req, free)

    def _decode(
        self,
        batch: Any,
        draft_input: Any,
        on_publish: Callable[[Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> Any:
        # The lengths come from the scheduler's stream.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        prefix_lens = batch.seq_lens
        roots = draft_input.bonus_tokens.view(-1)
        contexts = tuple(int(req.kv_committed_len) for req in batch.reqs)
        nodes = self._policy.choose(contexts, bool(batch.has_grammar))
        record = StepRecord(nodes, contexts, tuple(batch.reqs))
        self._ledger.launched(record)
        self._clock.start(record)

        trees = self._build(batch, draft_input, roots, prefix_lens, nodes)
        slots = self._slots(batch, prefix_lens, nodes)
        # Its copy to the host is queued ahead of the verify forward, which then hides it.
        links = grammar_tree(trees) if batch.has_grammar else None
        with self._phase("verify"):
            logits_output, graph = self._verify(batch, draft_input, trees, slots)
        with torch.inference_mode():  # operators cost the CPU a fraction of what they do outside
            done = self._settle(
                batch, record, trees, slots, logits_output, links, grammar_barrier, on_publish
            )
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=done.tokens.view(-1),
            accept_lens=done.lengths,
            can_run_cuda_graph=graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=done.bonus, new_seq_lens=done.seq_lens
            ),
            speculative_num_draft_tokens=int(self.block_size),
            new_seq_lens=done.seq_lens,
        )

    def _settle(
        self,
        batch: Any,
        record: StepRecord,
        trees: DraftTrees,
        slots: Tensor,
        logits_output: Any,
        links: Any,
        grammar_barrier: Callable[[], None] | None,
        on_publish: Callable[[Tensor], None] | None,
    ) -> Committed:
        """Accept, publish the new lengths, and put the accepted rows where the next step reads."""
        nodes = slots.shape[1]
        prefix_lens = batch.seq_lens
        with self._phase("accept"):
            logits = self._adjusted_logits(batch, logits_output, trees, links, grammar_barrier)
            max_path = min(int(self.block_size), nodes)
            accepted = self._acceptor(trees, logits, batch.sampling_info, prefix_lens, max_path)
            done = committed(trees, accepted, prefix_lens, slots, int(self.block_size))
            if on_publish is not None:
                on_publish(done.seq_lens)
            self._penalties.keep(batch.reqs, batch.req_pool_indices, done)
            if self._policy.wants_paths or self._observer is not None:
                record.path = _async_d2h(accepted.path)
            if batch.return_logprob:
                add_logprobs(batch, logits_output, done)
        with self._phase("compact"):
            self._compactor(self.model_runner.token_to_kv_pool, slots, accepted)
            hidden = logits_output.hidden_states
            if hidden is None:
                raise RuntimeError("DDTREE needs the target's tapped hidden states, got none")
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=hidden.view(slots.numel(), -1).index_select(0, done.rows.view(-1)),
                cache_loc=done.slots.view(-1),
                cache_loc_2d=done.slots,
                positions=done.positions.view(-1),
                commit_lens=done.lengths,
            )
        return done

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, if it is timed, and name it in a profile, if there is one."""
        with self._clock.phase(name), annotated(name):
            yield

    def _build(
        self, batch: Any, draft_input: Any, roots: Tensor, prefix_lens: Tensor, nodes: int
    ) -> DraftTrees:
        if nodes == 1:
            return self._roots(roots, prefix_lens)
        with self._phase("draft"):
            marginals = self._draft(batch, draft_input, prefix_lens)
        with self._phase("build"):
            return expand_tree(
                marginals.tokens,
                marginals.log_probs,
                roots,
                nodes - 1,
                self._options.seed_chain,
                prefix_lens,
            )

    def _slots(self, batch: Any, prefix_lens: Tensor, nodes: int) -> Tensor:
        """Return the slots of the step's nodes, int64[batch, nodes], reserved beforehand."""
        requests = len(prefix_lens)
        slots: Tensor = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=prefix_lens,
            end_offset=prefix_lens + nodes,
            batch_size=requests,
            draft_token_num=nodes,
            device=self.device,
        )
        return slots.view(requests, nodes)

    def _draft(self, batch: Any, draft_input: Any, prefix_lens: Tensor) -> DraftMarginals:
        """Run the drafter over [root, MASK, …] and return its marginals."""
        requests, block = len(prefix_lens), int(self.block_size)
        self._ensure_draft_block_buffers(requests)
        ids = self._draft_block_ids_buf[:requests]
        positions = self._draft_block_positions_buf[:requests]
        slots = self._draft_verify_out_cache_loc_buf[:requests]
        lens_cpu = self._draft_seq_lens_cpu_buf[:requests]
        _prepare_dflash_draft_block_unchecked(
            bonus_tokens=draft_input.bonus_tokens.view(-1),
            prefix_lens=prefix_lens.view(-1),
            req_pool_indices=batch.req_pool_indices.view(-1),
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            block_ids_out=ids,
            positions_out=positions,
            cache_loc_out=slots,
            mask_token_id=int(self._mask_token_id),
        )
        embeds = self.model_runner.model.get_input_embeddings()(ids)
        draft_lens = prefix_lens
        if self.use_compact_draft_cache:
            # The drafter sees the last window of the prefix, in a table of its own.
            draft_lens = self._compute_compact_draft_seq_lens(prefix_lens)
            self._fill_compact_seq_lens_cpu_bound(
                batch_seq_lens_cpu=batch.seq_lens_cpu,
                reserved_seq_lens_cpu=draft_input.reserved_seq_lens_cpu,
                draft_prefix_lens=draft_lens,
                out=lens_cpu,
            )
            self._rebuild_compact_draft_cache(
                req_pool_indices=batch.req_pool_indices,
                prefix_lens=prefix_lens,
                draft_prefix_lens=draft_lens,
                verify_out_cache_loc_2d=slots,
                bs=requests,
                block_size=block,
            )
        else:
            _host_bound(batch, draft_input, prefix_lens, block, lens_cpu)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=draft_lens,
            out_cache_loc=slots.view(-1),
            seq_lens_sum=int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions.view(-1),
            input_embeds=embeds.view(requests * block, -1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            out = self.draft_model_runner.forward(forward_batch)
        head: MarginalHead = self._head
        if self._draft_sampler is not None and out.can_run_graph:
            return head.captured(requests)
        hidden = out.logits_output.hidden_states
        if hidden is None:
            raise RuntimeError("the draft model returned no hidden states")
        return head.eager(hidden)

    def _verify(
        self, batch: Any, draft_input: Any, trees: DraftTrees, slots: Tensor
    ) -> tuple[Any, bool]:
        """Run the target over the trees' nodes; returns its output and whether a graph ran."""
        nodes = slots.shape[1]
        self._runners.activate(nodes)
        batch.out_cache_loc = slots.view(-1)
        lens_cpu, lens_sum = batch.seq_lens_cpu, batch.seq_lens_sum
        # Upper bounds for planning: the true lengths are on the GPU.
        if lens_cpu is not None:
            batch.seq_lens_cpu = lens_cpu + nodes
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        elif draft_input.reserved_seq_lens_cpu is not None:
            batch.seq_lens_cpu = draft_input.reserved_seq_lens_cpu
            batch.seq_lens_sum = int(draft_input.reserved_seq_lens_sum)
        forward_batch, _ = verify_input(trees).prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lens_cpu, lens_sum
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return out.logits_output, bool(out.can_run_cuda_graph)

    def _adjusted_logits(
        self,
        batch: Any,
        logits_output: Any,
        trees: DraftTrees,
        links: Any,
        grammar_barrier: Callable[[], None] | None,
    ) -> Tensor:
        """Apply penalties, biases and grammars to every node's logits, in place."""
        logits: Tensor = logits_output.next_token_logits
        self._penalties(logits, trees, batch.reqs, batch.req_pool_indices, batch.seq_lens)
        mask = None
        if links is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=links,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        if batch.sampling_info is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits,
                sampling_info=batch.sampling_info,
                draft_token_num=trees.tokens.shape[1],
            )
        if mask is not None:
            mask.apply(logits)
        return logits

    def _prefill(self, batch: Any, on_publish: Callable[[Tensor], None] | None) -> Any:
        """Prefill as DFLASH does, with log-probabilities too, and waiting for nothing.

        DFLASH copies lengths to the GPU from pageable memory, for which the host waits until the
        forward before has ended; what follows is then launched after it instead of beside it.
        """
        self._validate_phase1_sampling_support(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        output = result.logits_output
        if output.hidden_states is None:
            raise RuntimeError("DDTREE needs the target's tapped hidden states, got none")
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states,
            cache_loc=batch.out_cache_loc,
            positions=extend_positions(batch.prefix_lens, batch.extend_lens, self.device),
        )
        output.hidden_states = None  # the overlap schedule would copy them to the host
        result.next_draft_input = self._make_next_draft_input_prefill(
            bonus_tokens=result.next_token_ids, seq_lens=batch.seq_lens
        )
        return result

    def _make_observer(self) -> EngineObserver:
        pool = self.model_runner.token_to_kv_pool
        rows: Sequence[Tensor] = getattr(pool, "kv_buffer", None) or ()
        row_bytes = rows[0][0].numel() * rows[0].element_size() if rows else 0
        return EngineObserver(row_bytes, len(rows), self.draft_window_size)


def _with_width(server_args: Any, tokens: int) -> Any:
    """Return a copy that says `tokens` for speculative_num_draft_tokens: what the drafter reads."""
    made = deepcopy(server_args)
    made.override("longleaf.block", speculative_num_draft_tokens=tokens)
    vars(made).pop("max_speculative_num_draft_tokens", None)  # cached from the value before
    return made


def _host_bound(batch: Any, draft_input: Any, prefix_lens: Tensor, block: int, out: Tensor) -> None:
    """Fill in upper bounds of the lengths that the host can know without waiting."""
    if batch.seq_lens_cpu is not None:
        out.copy_(batch.seq_lens_cpu)
        out.add_(block)
    elif draft_input.reserved_seq_lens_cpu is not None:
        out.copy_(draft_input.reserved_seq_lens_cpu)
    else:
        out.copy_(prefix_lens)  # waits for the GPU; only where SGLang keeps no length at all
