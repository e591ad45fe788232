"""The names and signatures of SGLang that this package uses, and what to do if it lacks one."""

from __future__ import annotations

from attnmux.core import Integration, Interface


class SglangInterfaceWarning(UserWarning):
    """SGLang without interfaces that this package uses."""


INTEGRATION = Integration(
    name="attnmux-sglang",
    engine=("sglang",),
    remedy="install sglang 0.5.22 or 0.5.23, or a newer attnmux-sglang",
    warning=SglangInterfaceWarning,
)

ARGUMENTS = "sglang.srt.arg_groups"
BACKENDS = "sglang.srt.layers.attention"
RUNNER = "sglang.srt.model_executor"

REGISTRATION = (
    Interface(f"{ARGUMENTS}.choices", "add_attention_backend_choices"),
    Interface(f"{ARGUMENTS}.choices", "add_draft_attention_backend_choices"),
    Interface(f"{ARGUMENTS}.choices", "add_deterministic_attention_backend_choices"),
    Interface(f"{BACKENDS}.attention_registry", "register_attention_backend", ("name",)),
    Interface(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        ("target", "hook", "hook_type"),
    ),
    Interface("sglang.srt.plugins.hook_registry", "HookType.AROUND"),
    # The hooks' targets
    Interface(f"{ARGUMENTS}.model_hook", "handle_model_specific_adjustments", ("server_args",)),
    Interface(f"{ARGUMENTS}.model_hook", "model_config_of", ("server_args",)),
    Interface(f"{ARGUMENTS}.model_hook", "resolved_view", ("server_args",)),
    Interface(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory._create_backend",
        ("backend_name", "backend_map", "error_template", "stamps_children"),
    ),
    Interface(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory",
        attributes=("draft_model_runner", "speculative_num_steps", "topk"),
    ),
)
"""Interfaces that register `--attention-backend attnmux`."""

SERVING = (
    Interface(
        f"{BACKENDS}.base_attn_backend",
        "AttentionBackend",
        attributes=(
            "forward",
            "get_cuda_graph_seq_len_fill_value",
            "init_cuda_graph_state",
            "init_forward_metadata",
            "init_forward_metadata_in_graph",
            "init_forward_metadata_out_graph",
            "support_triton",
        ),
    ),
    Interface(
        f"{BACKENDS}.base_attn_backend",
        "AttentionBackend.init_forward_metadata_out_graph",
        ("forward_batch", "in_capture"),
        overridden=True,
    ),
    Interface(
        f"{BACKENDS}.base_attn_backend",
        "AttentionBackend.init_cuda_graph_state",
        ("max_bs", "max_num_tokens"),
        overridden=True,
    ),
    Interface("sglang.srt.configs.hybrid_arch", "mambaish_config", ("model_config",)),
    Interface("sglang.srt.configs.model_config", "is_deepseek_dsa", ("config",)),
    Interface(
        "sglang.srt.configs.model_config",
        "ModelConfig",
        attributes=(
            *("hf_config", "num_hidden_layers", "qk_nope_head_dim", "qk_rope_head_dim"),
            "v_head_dim",
        ),
    ),
    Interface(
        "sglang.srt.layers.radix_attention",
        "RadixAttention",
        attributes=(
            *("attn_type", "is_cross_attention", "k_scale_float", "layer_id", "logit_cap"),
            *("logit_capping_method", "pos_encoding_mode", "qk_head_dim", "scaling"),
            *("sliding_window_size", "tp_k_head_num", "tp_q_head_num", "tp_v_head_num"),
            *("use_irope", "v_head_dim", "v_scale_float", "xai_temperature_len"),
        ),
    ),
    Interface("sglang.srt.layers.radix_attention", "AttentionType.DECODER"),
    Interface("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool", attributes=("page_size",)),
    Interface("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_key_buffer", ("layer_id",)),
    Interface(
        "sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_value_buffer", ("layer_id",)
    ),
    Interface("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool", attributes=("page_size",)),
    Interface("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool.get_key_buffer", ("layer_id",)),
    Interface("sglang.srt.mem_cache.memory_pool", "ReqToTokenPool", attributes=("req_to_token",)),
    Interface(
        "sglang.srt.mem_cache.swa_memory_pool",
        "SWAKVPool",
        attributes=("full_kv_pool", "full_to_swa_index_mapping", "layers_mapping", "swa_kv_pool"),
    ),
    Interface(f"{RUNNER}.cuda_graph_config", "check_cuda_graph_backend", ("phase", "backend")),
    Interface(f"{RUNNER}.cuda_graph_config", "Backend.DISABLED"),
    Interface(f"{RUNNER}.cuda_graph_config", "Phase.DECODE"),
    Interface(
        f"{RUNNER}.forward_batch_info",
        "ForwardBatch",
        attributes=(
            *("_attn_output", "batch_size", "extend_seq_lens", "extend_seq_lens_cpu"),
            *("forward_mode", "out_cache_loc", "positions", "req_pool_indices", "seq_lens"),
            *("seq_lens_cpu", "spec_info"),
        ),
    ),
    Interface(
        f"{RUNNER}.forward_batch_info",
        "ForwardMode",
        attributes=(
            *("DECODE", "DRAFT_EXTEND_V2", "EXTEND", "IDLE", "MIXED", "SPLIT_PREFILL"),
            "TARGET_VERIFY",
        ),
    ),
    Interface(
        f"{RUNNER}.forward_batch_info",
        "build_inner_fb_view",
        ("forward_batch", "bs", "forward_mode"),
    ),
    Interface(
        f"{RUNNER}.model_runner",
        "ModelRunner",
        attributes=(
            *("attention_chunk_size", "decode_attention_backend_str", "dtype", "kv_cache_dtype"),
            *("kv_index_translator", "model", "model_config", "page_size"),
            *("prefill_attention_backend_str", "req_to_token_pool", "server_args"),
            *("sliding_window_size", "token_to_kv_pool", "use_mla_backend"),
        ),
    ),
    Interface(
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
    ),
    Interface(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods",
        "AttnForwardMethod.MLA",
    ),
    Interface("sglang.srt.models.deepseek_common.utils", "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"),
    Interface("sglang.srt.runtime_context", "get_exec", ()),
    Interface("sglang.srt.runtime_context", "get_spec", ()),
    Interface(
        f"{ARGUMENTS}.fields.spec",
        "Spec",
        attributes=(
            *("speculative_algorithm", "speculative_attention_mode", "speculative_eagle_topk"),
            "speculative_num_draft_tokens",
        ),
    ),
)
"""Interfaces that the backend, its requests, its steps and its pools use."""

INTERFACES = (*REGISTRATION, *SERVING)
