"""What the plugin relies on in SGLang and beside it: data only, checked before anything starts.

SOURCES: SHA-256 of the files whose inner workings the plugin was written against, imported by it or
not: model code calls the attention backend, and pools and graph buffers are handed to it.
SIGNATURES: the functions that it calls, overrides or is called like, as
`longleaf.engine.drift.signature` writes them. A new import from sglang in this package needs a
line in SOURCES; `make test-engine` says which one, and that no name here is missing from the
pinned wheel.
"""

from collections.abc import Mapping

SGLANG_VERSION = "0.5.17"
TORCH_RELEASE = "2.11"
"""Release line of torch that the pinned SGLang and its kernels are built for."""
CUDA_MAJOR = 13
KERNELS_ABI_VERSION = 3
"""Version of the C interface of `longleaf_kernels`' library."""

SOURCES: Mapping[str, str] = {
    "sglang.kernels.ops.kvcache.mla_buffer": (
        "3726d1c298e50cfcc3704573ffc001ac9343294480d331552e22f907bcf546de"
    ),
    "sglang.kernels.ops.speculative.cache_locs": (
        "d1ae7029c4591ba79f9cc62c42cb2aaea896ca32bd918ce046063515f3ee0e65"
    ),
    "sglang.kernels.ops.speculative.dflash": (
        "f4cc3f2539a9ae6b1db0c0704f88bff557afc88f6bf25269e33ed13d574373b5"
    ),
    "sglang.launch_server": ("9a54ec8ad199766518c519b6b98ea6170ad8ec157029eed4bb3a49431b86a540"),
    "sglang.srt.arg_groups.speculative_hook": (
        "6ffb0b4066e92257ac88c03627df28f7e226fef25eae63a5d2771a74f656bac1"
    ),
    "sglang.srt.configs.model_config": (
        "1a7f83272fed7fae8efafde1b89d254a2e8f67fedd8e67b2d472d2dbd261c0d6"
    ),
    "sglang.srt.distributed": ("8c539ccadfb01403cc05401ff739196a535096dfb8aea993ea908a073d44e2aa"),
    "sglang.srt.entrypoints.http_server": (
        "1de1fbce4c87b11b01ab99c802d0684053dc4539b95d8b3a8d88c80d7d238e9a"
    ),
    "sglang.srt.entrypoints.v1_loads": (
        "528deeb3210d8ea9039b9e20fbeff28d326d8efe49d16c55ef662e8091c22bd2"
    ),
    "sglang.srt.environ": ("85f728eef50c73d660a8466f91c774adfb6d5abdca268c0ed02ff97c44ccac80"),
    "sglang.srt.layers.attention.attention_registry": (
        "b8174416b2f4a97724f6f28e375700992c23879a06b9822b33375eb2c0ac8b70"
    ),
    "sglang.srt.layers.attention.base_attn_backend": (
        "59b72753ad1e04cc7f74877cf178f660aafd6b9db7d770068b78efc3b069d5af"
    ),
    "sglang.srt.layers.logprob_processor": (
        "d8fc9ce621d3130f6c586b6288e888c2d4cc117336f86e8384f9486d49d3048d"
    ),
    "sglang.srt.layers.radix_attention": (
        "455f259bdd95147ef1f369777e97113b33ec0cbe15222a323ff986e2b36bf89b"
    ),
    "sglang.srt.layers.logits_processor": (
        "cf3f0f71ff54870362698ebf2b67ced9d668ee59bfc9e0e97510f6f99a4aa016"
    ),
    "sglang.srt.managers.overlap_utils": (
        "7762a4e463a8052fdac22e76ba904cedb35fb2deabda687849724a354bc891aa"
    ),
    "sglang.srt.managers.schedule_batch": (
        "7bdd988f3274bb11b3b5fd699b985ae27c28ff9e2e7f601a6320e182efcf1595"
    ),
    "sglang.srt.managers.scheduler": (
        "1d4a7683e32f0862cf5b03be33e5ec23f9d112e59546d391e28fa222fcd1619b"
    ),
    "sglang.srt.managers.tokenizer_manager": (
        "0385c00527d2c8ad53021a2170e73a6a3eda5dd94a54c3e86a549c56b2fd4f61"
    ),
    "sglang.srt.managers.utils": (
        "23967b5942bc893d843f39028bb6d091c678125bc4378fa09499804b26f3c7ea"
    ),
    "sglang.srt.mem_cache.kv_cache_configurator": (
        "a99b6e25efcd7c56a72c215fcd98ba7fe70bd53a37e8e4b8cec6205d3c45bdaf"
    ),
    "sglang.srt.mem_cache.memory_pool": (
        "29ef7b37d2e12b1a4b674b97c33b3ceb05cd8421a3742eb33cb6a75f52896ddc"
    ),
    "sglang.srt.model_executor.cuda_graph_buffer_registry": (
        "a2ace30e94f775443ecee720f3d7668c24b80bb95f4b2af1c27f12fd14529caf"
    ),
    "sglang.srt.model_executor.cuda_graph_config": (
        "a131496f543eb354e91ca818b0f3863918da51aadae8e8a6fba087edd30cec76"
    ),
    "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin": (
        "4d46d49221749cff5289c262d8acd6e2f5f3d44db1a1d7ffabbeb32fd9e6f05a"
    ),
    "sglang.srt.model_executor.forward_batch_info": (
        "be44232b841781ae6b6e1f4c011a49461bec7fe12e6a45a87cd16fab3864f232"
    ),
    "sglang.srt.model_executor.model_runner": (
        "221032bf7ae57d2ebdb96801150a48d23244840a9b7938dc586e911671c11102"
    ),
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup": (
        "6382174da16422a4086364b0192c52a6008517af06c443aee53a62e5a0068f3a"
    ),
    "sglang.srt.model_executor.model_runner_components.misc_utils": (
        "56a5b1497efaddc4520647484ca825a48695ad48f8a13d29d2eb393377650eb4"
    ),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner": (
        "c21e3535041c5f07ac466d77f156d81b28737ed96c8a8fcf1cd3f48e7f7c44cd"
    ),
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph": (
        "7cc27ba46d122dfe8f37ff11f02223e4fb2cc5577165a5d6d4dabd7b023488c7"
    ),
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": (
        "364c2cdfabfc7c1e746f87aced897c54f10790fd5a05c4f9100d342ab6db85a6"
    ),
    "sglang.srt.models.deepseek_common.attention_backend_handler": (
        "e704226c6a6d233cd1df5930a3297112fa088d1de252bd1d4ebba91e27925c5f"
    ),
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods": (
        "e8512988de05accfd3be326eab5dd41a4028371b9fa623f3127c778822ef76e0"
    ),
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha": (
        "5489025f1a66fb7fd07e2565a9167d720520f1194b65dc21bdc2c702978b4b5a"
    ),
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla": (
        "4a4aab7f693060bcded9379e337ff29f9f027390c7a44601ebb0b11a9483b132"
    ),
    "sglang.srt.models.deepseek_v2": (
        "e73c033416e8746bb435dd4e7d39ead521039c511182b5f8b536a40a3308d08a"
    ),
    "sglang.srt.models.dflash": (
        "121c584a38f6512037416e29d8aac6b532188630c848da9ca9d4b2186bd85885"
    ),
    "sglang.srt.plugins": ("3a975a73f1a7887e68c81ea7a2530250597ac8ae978efc0b0f70f038a99a3164"),
    "sglang.srt.plugins.hook_registry": (
        "fe214acac324cb2f019aa1dffe1ddcb6e4691862fdd1b6a0ad5033d8167e31e9"
    ),
    "sglang.srt.runtime_context": (
        "d257c381d2d05b90b16d3e3ece41d65c3c4dcd5dcd22028a4cb3bd9b322784ab"
    ),
    "sglang.srt.sampling.sampling_params": (
        "9437125033cd7abe001689cef162ba558454fb455f577e7b36b4eaa4d3f95c24"
    ),
    "sglang.srt.server_args": ("79d9bbb61b429574e31e7a7e319831fcd129a83a475e6ffe2b7e8a5e8eb06b0f"),
    "sglang.srt.server_args_config_parser": (
        "3966b1206230239aa81def9fd0008d0eab68e5ce11b7bc39f369f5570287a1e6"
    ),
    "sglang.srt.speculative.dflash_info": (
        "888887f8a8e2e214f0942c92fd2afd58b9502ffa358aad272ab885b0aeae7086"
    ),
    "sglang.srt.speculative.dflash_info_v2": (
        "2cc95adae184717c208e9c7f42ae5a08e81c9d4b94c907a020d5cc249c05b1fc"
    ),
    "sglang.srt.speculative.dflash_utils": (
        "c432efd27a08689cb32008506bc68956cf7689450cb947337f0770dae432e6a5"
    ),
    "sglang.srt.speculative.dflash_worker_v2": (
        "c3f3eca69abafa2436ed9e757287e2a2496109346f093aa5a688f0f0c8a57bb8"
    ),
    "sglang.srt.speculative.ngram_info": (
        "4b8886e17ca55bba9b6706ae025eed45fae307cf42a5e98e26a08c0b7313e25d"
    ),
    "sglang.srt.speculative.spec_info": (
        "1435f9d2ba846f813ca7f50ca2dbb90564b60006ecddfd3a852dc8ac6fb25506"
    ),
    "sglang.srt.speculative.spec_registry": (
        "a42114f84258e4b0c5b4849b2e053fd1c19e1b3d25549034b3e48c67b940bce5"
    ),
    "sglang.srt.speculative.spec_utils": (
        "480f89e900529d6cc6f9544217184cfbf2ebed29c9e30e0071b0a7fc9f4b2c91"
    ),
    "sglang.srt.utils.hf_transformers_utils": (
        "7936a23e92f552e8c854af19134a8e19d512998cf8d1c897fe56b30af6751f78"
    ),
}

SIGNATURES: Mapping[str, Mapping[str, str]] = {
    "sglang.kernels.ops.speculative.cache_locs": {
        "assign_extend_cache_locs_func": (
            "(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, "
            "draft_token_num, device)"
        ),
    },
    "sglang.kernels.ops.speculative.dflash": {
        "_prepare_dflash_draft_block_unchecked": (
            "(bonus_tokens, prefix_lens, req_pool_indices, req_to_token, block_ids_out, "
            "positions_out, cache_loc_out, mask_token_id)"
        ),
    },
    "sglang.srt.arg_groups.speculative_hook": {
        "_handle_dflash": "(server_args)",
    },
    "sglang.srt.distributed": {
        "get_tp_group": "()",
    },
    "sglang.srt.layers.attention.attention_registry": {
        "register_attention_backend": "(name)",
    },
    "sglang.srt.layers.attention.base_attn_backend": {
        "AttentionBackend.draft_extend_metadata_captured_in_graph": "(self)",
        "AttentionBackend.forward": (
            "(self, q, k, v, layer, forward_batch, save_kv_cache=, **kwargs)"
        ),
        "AttentionBackend.forward_decode": (
            "(self, q, k, v, layer, forward_batch, save_kv_cache=, **kwargs)"
        ),
        "AttentionBackend.forward_extend": (
            "(self, q, k, v, layer, forward_batch, save_kv_cache=, **kwargs)"
        ),
        "AttentionBackend.forward_mixed": "(self, q, k, v, layer, forward_batch, save_kv_cache=)",
        "AttentionBackend.get_cuda_graph_seq_len_fill_value": "(self)",
        "AttentionBackend.get_indexer_metadata": "(self, layer_id, forward_batch)",
        "AttentionBackend.init_cuda_graph_state": "(self, max_bs, max_num_tokens)",
        "AttentionBackend.init_forward_metadata": "(self, forward_batch)",
        "AttentionBackend.init_forward_metadata_for_breakable_cuda_graph_capture": (
            "(self, forward_batch)"
        ),
        "AttentionBackend.init_forward_metadata_in_graph": "(self, forward_batch)",
        "AttentionBackend.init_forward_metadata_out_graph": "(self, forward_batch, in_capture=)",
        "AttentionBackend.on_after_cuda_graph_warmup": "(self)",
        "AttentionBackend.prepare_forward_metadata_for_breakable_cuda_graph_replay": (
            "(self, capture_metadata, forward_batch, *, static_forward_batch=)"
        ),
        "AttentionBackend.prepare_full_cuda_graph_chunked_prefix": (
            "(self, forward_batch, *, in_capture)"
        ),
        "AttentionBackend.support_triton": "(self)",
        "AttentionBackend.update_verify_buffers_to_fill_after_draft": (
            "(self, spec_info, cuda_graph_bs)"
        ),
    },
    "sglang.srt.layers.logprob_processor": {
        "compute_spec_v2_logprobs": (
            "(batch, logits_output, predict, accept_index, speculative_num_steps)"
        ),
    },
    "sglang.srt.managers.utils": {
        "_async_d2h": "(t)",
    },
    "sglang.srt.model_executor.cuda_graph_config": {
        "check_cuda_graph_backend": "(phase, backend)",
    },
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph": {
        "is_in_breakable_cuda_graph": "()",
    },
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": {
        "is_in_tc_piecewise_cuda_graph": "()",
    },
    "sglang.srt.plugins": {
        "load_plugins": "()",
    },
    "sglang.srt.runtime_context": {
        "get_context": "()",
        "get_exec": "()",
        "get_parallel": "()",
        "get_spec": "()",
    },
    "sglang.srt.server_args": {
        "ServerArgs.add_cli_args": "(parser)",
        "ServerArgs.from_cli_args": "(args)",
        "add_attention_backend_choices": "(choices)",
        "add_chunked_prefix_cache_attention_backend": "(backend_name)",
        "prepare_server_args": "(argv)",
    },
    "sglang.srt.speculative.dflash_info": {
        "DFlashVerifyInput.__eq__": "(self, other)",
        "DFlashVerifyInput.__init__": (
            "(self, draft_token, positions, draft_token_num, topk=, custom_mask=, "
            "capture_hidden_mode=, num_tokens_per_req=, ragged_verify_layout=)"
        ),
        "DFlashVerifyInput.__post_init__": "(self)",
        "DFlashVerifyInput.__repr__": "(self)",
        "DFlashVerifyInput.generate_attn_arg_prefill": (
            "(self, req_pool_indices, paged_kernel_lens, paged_kernel_lens_sum, req_to_token, "
            "kv_start_idx=)"
        ),
        "DFlashVerifyInput.prepare_for_verify": "(self, batch, target_worker)",
    },
    "sglang.srt.speculative.dflash_utils": {
        "apply_dflash_verify_logits_adjustments": (
            "(*, next_token_logits, sampling_info, draft_token_num)"
        ),
        "parse_dflash_draft_config": "(*, draft_hf_config)",
        "resolve_dflash_verify_mask_policy": "(attn_backend)",
    },
    "sglang.srt.speculative.dflash_worker_v2": {
        "DFlashWorkerV2.__getattr__": "(self, name)",
        "DFlashWorkerV2.__init__": "(self, server_args, gpu_id, ps, nccl_port, target_worker)",
        "DFlashWorkerV2._append_target_hidden_fused": (
            "(self, ctx_hidden, ctx_positions, ctx_cache_loc, ctx_cache_loc_2d=, commit_lens=)"
        ),
        "DFlashWorkerV2._append_target_hidden_sequential": (
            "(self, ctx_hidden, ctx_positions, ctx_cache_loc)"
        ),
        "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": (
            "(self, *, target_hidden, cache_loc, positions, cache_loc_2d=, commit_lens=)"
        ),
        "DFlashWorkerV2._compute_compact_draft_seq_lens": "(self, seq_lens)",
        "DFlashWorkerV2._compute_compact_draft_seq_lens_host": "(self, host_seq_lens, out)",
        "DFlashWorkerV2._ensure_accept_bonus_buffers": "(self, bs)",
        "DFlashWorkerV2._ensure_draft_block_buffers": "(self, bs)",
        "DFlashWorkerV2._fill_compact_seq_lens_cpu_bound": (
            "(self, *, batch_seq_lens_cpu, reserved_seq_lens_cpu, draft_prefix_lens, out)"
        ),
        "DFlashWorkerV2._gather_req_to_token_masked": (
            "(self, *, req_to_token, req_pool_indices, pos2d, mask, context)"
        ),
        "DFlashWorkerV2._gather_req_to_token_segments": (
            "(self, *, req_to_token, req_pool_indices, start, lengths)"
        ),
        "DFlashWorkerV2._greedy_sample_from_vocab_parallel_head": (
            "(self, *, hidden_states, lm_head, chunk_size=)"
        ),
        "DFlashWorkerV2._init_fused_kv_helper": "(self)",
        "DFlashWorkerV2._make_next_draft_input_decode": "(self, *, bonus_tokens, new_seq_lens)",
        "DFlashWorkerV2._make_next_draft_input_prefill": "(self, *, bonus_tokens, seq_lens)",
        "DFlashWorkerV2._maybe_build_draft_sampler": "(self)",
        "DFlashWorkerV2._next_accept_bonus_buffers": "(self, bs)",
        "DFlashWorkerV2._rebuild_compact_draft_cache": (
            "(self, *, req_pool_indices, prefix_lens, draft_prefix_lens, "
            "verify_out_cache_loc_2d, bs, block_size)"
        ),
        "DFlashWorkerV2._resolve_mask_token_id": "(self, *, mask_token, mask_token_id=)",
        "DFlashWorkerV2._update_target_mamba_state_after_verify": (
            "(self, *, batch, seq_lens_pre_verify, commit_lens)"
        ),
        "DFlashWorkerV2._validate_phase1_sampling_support": "(self, batch)",
        "DFlashWorkerV2.alloc_memory_pool": (
            "(self, memory_pool_config=, req_to_token_pool=, token_to_kv_pool_allocator=)"
        ),
        "DFlashWorkerV2.clear_cache_pool": "(self)",
        "DFlashWorkerV2.forward_batch_generation": "(self, batch, on_publish=, grammar_barrier=)",
        "DFlashWorkerV2.init_attention_backends": "(self)",
        "DFlashWorkerV2.init_cuda_graphs": "(self)",
    },
    "sglang.srt.speculative.spec_info": {
        "SpeculativeAlgorithm.register": (
            "(name, *, supports_overlap=, validate_server_args=, spec_class=)"
        ),
    },
    "sglang.srt.speculative.spec_registry": {
        "CustomSpecAlgo.__init__": (
            "(self, name, factory, *, supports_overlap=, validate_server_args=)"
        ),
        "CustomSpecAlgo.create_worker": "(self, server_args)",
        "CustomSpecAlgo.get_num_tokens_per_req_for_target_verify": (
            "(self, num_draft_tokens, is_draft_worker)"
        ),
        "CustomSpecAlgo.handle_server_args": "(self, server_args)",
        "get_spec": "(name)",
    },
    "sglang.srt.speculative.spec_utils": {
        "build_grammar_vocab_mask": "(*, reqs, tree, sampling_info, device, barrier)",
    },
    "sglang.srt.utils.hf_transformers_utils": {
        "get_config": (
            "(model, trust_remote_code, revision=, model_override_args=, model_config_parser=, "
            "**kwargs)"
        ),
    },
}
