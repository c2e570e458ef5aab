"""SGLang's attention backend `longleaf_mla`: an MLA target's attention through `verify_mla`.

The step's K/V are written to the cache first; the prefix that the kernel reads never includes
them. Its list of slots is made outside the captured graph, on the device: SGLang lets the
scheduler write the request table again as soon as a replay has been prepared.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from longleaf.engine import extend
from longleaf.engine.metadata import (
    FixedBits,
    GraphPlans,
    StepPlan,
    fill_visible,
    fixed_bits,
    full_mask_bits,
    plan_prefix,
    words,
)
from longleaf.engine.switches import BACKEND
from longleaf_kernels.verify import (
    LATENT_DIM,
    MAX_HEADS,
    MAX_NODES,
    ROW_DIM,
    verify_mla,
    verify_workspace,
)

NAME = BACKEND
POOL_TYPES = (torch.bfloat16, torch.float8_e4m3fn)


def register() -> type[AttentionBackend]:
    """Make SGLang know the backend by its name; twice is once. Returns its class."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    if NAME not in server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        server_args.add_chunked_prefix_cache_attention_backend(NAME)
    attention_registry.register_attention_backend(NAME)(create)
    return LongleafMlaBackend


def create(model_runner: Any) -> "LongleafMlaBackend":
    """Build a runner's backend; a second one of the same runner shares the first one's buffers."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    AttentionBackendRegistry.register(NAME, extend.attention_method)
    first = getattr(model_runner, "attn_backend", None)
    return LongleafMlaBackend(
        model_runner, share=first if isinstance(first, LongleafMlaBackend) else None
    )


def check_runner(runner: Any) -> None:
    """Raise ValueError, with what to do, for a server that the backend cannot serve."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.runtime_context import get_parallel

    args = runner.server_args
    config = runner.model_config
    if runner.is_draft_worker:
        raise ValueError(
            f"{NAME} serves the target model, not the drafter: "
            "start with --speculative-draft-attention-backend triton"
        )
    if not runner.use_mla_backend:
        raise ValueError(f"{NAME} serves MLA models only: choose another --attention-backend")
    if runner.page_size != 1:
        raise ValueError(
            f"{NAME} reads single-token pages, got --page-size {runner.page_size}: "
            "start with --page-size 1"
        )
    dims = (config.kv_lora_rank, config.qk_rope_head_dim)
    if dims != (LATENT_DIM, ROW_DIM - LATENT_DIM):
        raise ValueError(
            f"{NAME} needs kv_lora_rank {LATENT_DIM} and qk_rope_head_dim "
            f"{ROW_DIM - LATENT_DIM}, the model has {dims[0]} and {dims[1]}"
        )
    if config.dtype != torch.bfloat16:
        raise ValueError(f"{NAME} computes in bfloat16, got {config.dtype}: --dtype bfloat16")
    if runner.token_to_kv_pool.dtype not in POOL_TYPES:
        raise ValueError(
            f"{NAME} reads a bfloat16 or float8_e4m3fn cache, got "
            f"{runner.token_to_kv_pool.dtype}: --kv-cache-dtype auto or fp8_e4m3"
        )
    graphs = (Backend.FULL, Backend.BREAKABLE, Backend.TC_PIECEWISE)
    if any(check_cuda_graph_backend(Phase.PREFILL, kind) for kind in graphs):
        raise ValueError(
            f"{NAME} chooses the form of every extend by its length, which no prefill graph can: "
            "start with --disable-prefill-cuda-graph"
        )
    parallel = get_parallel()
    heads = config.num_attention_heads // parallel.attn_tp_size
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"{NAME} serves 1 to {MAX_HEADS} heads a GPU, got {heads}")
    unsupported = {
        "decode context parallelism": parallel.attn_dcp_size > 1,
        "context-parallel prefill": parallel.attn_cp_size > 1,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--enable-pdmux": args.enable_pdmux,
        "the unified memory pool": hasattr(runner.token_to_kv_pool_allocator, "translate_kv_loc"),
    }
    for what, asked in unsupported.items():
        if asked:
            raise ValueError(f"{NAME} does not serve {what}: start without it")


class LongleafMlaBackend(AttentionBackend):
    """Target verify, decode and extend of an MLA model, and CUDA graphs of the first two.

    One instance serves graph runners of every width. Instances that share buffers must run on
    one stream.
    """

    needs_cpu_seq_lens = False
    """Lengths are read on the device alone, where they may be ahead of the host's copy."""

    def __init__(self, model_runner: Any, share: "LongleafMlaBackend | None" = None) -> None:
        """share: another backend of the same runner, whose buffers this one uses too."""
        check_runner(model_runner)
        super().__init__()
        self._device = torch.device(model_runner.device)
        # SGLang's forward context looks for both pools on the backend.
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._req_to_token: Tensor = self.req_to_token_pool.req_to_token
        self._varlen = extend.chosen_varlen()
        extend.absorbed_extend_tokens()  # says at the start what is wrong with it
        self._fixed: dict[int, FixedBits] = {}
        if share is None:
            self._workspace = verify_workspace(self._device)
            self._graphs = GraphPlans(self._req_to_token.shape[1], self._device)
        else:
            self._workspace, self._graphs = share._workspace, share._graphs
        self._step: StepPlan | None = None
        self._extend: extend.ExtendBatch | None = None

    def buffer_bytes(self) -> int:
        """Bytes of device memory that this backend and those that share with it hold for good."""
        return int(self._workspace.nbytes) + self._graphs.nbytes

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward pass outside any graph."""
        mode = forward_batch.forward_mode
        self._step = self._extend = None
        if mode.is_idle():
            return
        if mode.is_decode() or mode.is_target_verify():
            nodes = _nodes(forward_batch)
            batch = forward_batch.seq_lens.shape[0]
            # The most slots that lengths on the device can ask for: no host copy is trusted.
            slots = torch.empty(
                batch * self._req_to_token.shape[1], dtype=torch.int32, device=self._device
            )
            pointers = torch.empty(batch + 1, dtype=torch.int32, device=self._device)
            visible = None
            if nodes > 1:
                visible = torch.empty(
                    batch * nodes, words(nodes), dtype=torch.int64, device=self._device
                )
            self._step = StepPlan(pointers, slots, visible, None, nodes)
            self._fill(self._step, forward_batch, batch)
        elif mode.is_extend_or_draft_extend_or_mixed():
            self._extend = extend.ExtendBatch(forward_batch, self._req_to_token, self._varlen)
        else:
            raise NotImplementedError(f"{NAME} does not serve forward mode {mode.name}")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserve what the graphs of one runner read."""
        self._graphs.reserve(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of padding requests; their prefix is empty whatever it says."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture or a replay of a graph of one batch size and width."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(f"{NAME} captures no graph of forward mode {mode.name}")
        nodes = _nodes(forward_batch)
        batch = forward_batch.batch_size
        if in_capture:
            plans = [self._graphs.captured(batch, nodes)]
        else:
            plans = self._graphs.replayed(batch, nodes)
        rows = batch - getattr(forward_batch, "num_padding", 0)
        for plan in plans:
            self._fill(plan, forward_batch, rows, in_capture=in_capture)
        self._step = plans[-1]

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing is left to fill: the tree is known when a replay is prepared."""

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attend one token a request. q [T, H * 576], k [T, 1, 576]; returns [T, H * 512]."""
        return self._absorbed(q, k, layer, forward_batch, save_kv_cache, self._step)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend a verify or an extend, in the form that the layer's dimensions say.

        Absorbed: as `forward_decode`. Up-projected: q [T, H, qk], k [S, H, qk], v [S, H, v];
        returns [T, H, v], with the log-sum-exp [T, H] where SGLang asks for it.
        """
        if forward_batch.forward_mode.is_target_verify():
            return self._absorbed(q, k, layer, forward_batch, save_kv_cache, self._step)
        if self._extend is None:
            raise RuntimeError("init_forward_metadata was not called before an extend")
        if (layer.qk_head_dim, layer.v_head_dim) == (ROW_DIM, LATENT_DIM):
            plan = self._extend.absorbed()
            return self._absorbed(q, k, layer, forward_batch, save_kv_cache, plan)
        if save_kv_cache:
            raise RuntimeError("an up-projected extend must have written its latents already")
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._extend.up_projected().attend(q, k, v, forward_batch, layer.scaling)

    def _absorbed(
        self,
        q: Tensor,
        k: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        plan: StepPlan | None,
    ) -> Tensor:
        if plan is None:
            raise RuntimeError("no metadata was prepared for this forward pass")
        if save_kv_cache:
            slots = forward_batch.out_cache_loc[: k.shape[0]]
            self.token_to_kv_pool.set_mla_kv_buffer(
                layer, slots, k[..., :LATENT_DIM], k[..., LATENT_DIM:]
            )
        tokens = q.shape[0]
        # SGLang's MLA cache is written without a scale, so a stored value is the value.
        out, _ = verify_mla(
            q.view(-1, layer.tp_q_head_num, ROW_DIM)[: plan.rows],
            self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(-1, ROW_DIM),
            plan.kv_indptr,
            plan.kv_indices,
            k.view(-1, ROW_DIM)[: plan.rows],
            plan.visible,
            scale=layer.scaling,
            workspace=self._workspace,
            q_indptr=plan.q_indptr,
            max_nodes=plan.nodes,
        )
        out = out.view(-1, layer.tp_q_head_num * LATENT_DIM)
        padding = tokens - out.shape[0]
        return out if padding <= 0 else torch.nn.functional.pad(out, (0, 0, 0, padding))

    def _fill(
        self, plan: StepPlan, forward_batch: Any, rows: int, *, in_capture: bool = False
    ) -> None:
        """Write the prefixes and the visibility of the first `rows` requests; the rest is padding.

        A graph always reads bits, a chain's too: what it was captured with never decides what a
        replay sees.
        """
        verify = forward_batch.forward_mode.is_target_verify()
        plan_prefix(
            plan.kv_indptr,
            plan.kv_indices,
            self._req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            rows=rows,
            # A verify's lengths are those of the prefix; a decode's count its own token.
            shorter=0 if verify else 1,
        )
        if plan.visible is None:
            return
        bits = None if in_capture else self._bits(forward_batch, plan.nodes, rows)
        if bits is not None:
            rows = bits.shape[0] // plan.nodes
        if plan.nodes not in self._fixed:
            self._fixed[plan.nodes] = fixed_bits(plan.nodes, self._device)
        fill_visible(plan.visible, bits, rows, self._fixed[plan.nodes])

    def _bits(self, forward_batch: Any, nodes: int, rows: int) -> Tensor | None:
        """Return the tree's visibility, int64 [requests * nodes, words], None for a chain."""
        if rows == 0:
            return None
        spec = forward_batch.spec_info
        if hasattr(spec, "visible"):
            if spec.visible is None:
                raise ValueError("a tree verify came without its visibility")
            bits: Tensor = spec.visible.reshape(-1, spec.visible.shape[-1])
            if bits.shape[1] != words(nodes) or bits.shape[0] % nodes or bits.shape[0] == 0:
                raise ValueError(
                    f"visible must be [requests, {nodes}, {words(nodes)}], "
                    f"got {list(spec.visible.shape)}"
                )
            if bits.shape[0] > rows * nodes:
                raise ValueError(f"visible has {bits.shape[0] // nodes} requests of {rows}")
            return bits
        kind = spec.spec_input_type.name
        if kind == "DFLASH_VERIFY":
            return None
        if kind == "NGRAM_VERIFY":
            return full_mask_bits(spec.custom_mask, forward_batch.seq_lens[:rows], nodes)
        raise NotImplementedError(f"{NAME} cannot verify {kind}: it knows no tree of that kind")


def _nodes(forward_batch: Any) -> int:
    """Return how many rows of this pass belong to a request."""
    if not forward_batch.forward_mode.is_target_verify():
        return 1
    spec = forward_batch.spec_info
    if spec is None:  # an idle rank that replays with the others
        return int(forward_batch.input_ids.shape[0] // forward_batch.batch_size)
    if getattr(spec, "ragged_verify_layout", None) is not None:
        raise NotImplementedError(f"{NAME} does not serve ragged verifies")
    nodes = int(spec.draft_token_num)
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"{NAME} verifies 1 to {MAX_NODES} nodes a request, got {nodes}")
    return nodes
