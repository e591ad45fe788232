"""Values of config fields that the rules cannot know, by the config's class."""

from __future__ import annotations

from collections.abc import Mapping

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_expand": 2}
BYTES = {"hidden_size": 32, "hidden_size_global": 64, "num_attention_heads": 4, "head_dim": 8}
INDEXED = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 32}
"""Dims of an indexer: with few heads, many keys have no positive product with any of them, hence
the same score."""
REAL_OVERRIDES: Mapping[str, object] = {"index_head_dim": 128}
"""Where dims are those of deployed models, whatever the config's class."""
SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SHARED_ATTENTION = {
    "num_hidden_layers": 5,
    "layers_block_type": [*["linear_attention", "hybrid"] * 2, "linear_attention"],
}

SECTIONS = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
NARROW_SECTIONS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 128 and 64 dims, which rotate by time, height and width in a class's own sections."""

OVERRIDES: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(
        ["Qwen2VLTextConfig", "Qwen2_5OmniTextConfig", "Qwen2_5_VLTextConfig"], SECTIONS
    ),
    **dict.fromkeys(["Glm4vMoeTextConfig", "Glm4vTextConfig"], NARROW_SECTIONS),
    **dict.fromkeys(["AXK2Config", "DeepseekV32Config", "HYV4Config"], INDEXED),
    "BambaConfig": {**GROUPED, **MAMBA2, "hidden_size": 32, "attn_layer_indices": [1]},
    "BigBirdConfig": {"attention_type": "original_full"},  # the one that is causal
    "BltConfig": {"encoder_hash_byte_group_vocab": 64, "cross_attn_k": 2},
    "BltGlobalTransformerConfig": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    **dict.fromkeys(
        ["BltLocalDecoderConfig", "BltLocalEncoderConfig"],
        BYTES,
    ),
    "CodeGenConfig": {"n_embd": 64, "n_head": 4, "rotary_dim": 8},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    "DbrxAttentionConfig": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
    "DbrxConfig": {"d_model": 64, "n_heads": 4},
    "DbrxFFNConfig": {"hidden_size": 64, "ffn_hidden_size": 32},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "DeepseekV4Config": {
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "mlp_layer_types": ["moe"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 2,
    },
    "DogeConfig": {"keep_window_size": 64},
    "Dots1Config": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "Dots3NoteTextConfig": {
        **INDEXED,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "Emu3Config": {
        "vocabulary_map": {"<image>": 90, "<|extra_200|>": 91, "<|visual token 000000|>": 92}
    },
    "Gemma3nTextConfig": {
        **SHARED_KV,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 16,
    },
    "Gemma4TextConfig": {
        **SHARED_KV,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "vocab_size_per_layer_input": 150,
        "hidden_size_per_layer_input": 16,
    },
    "GlmMoeDsaConfig": {**INDEXED, "indexer_types": ["full", "shared", "full"]},
    "GraniteMoeHybridConfig": {
        **GROUPED,
        **MAMBA2,
        "hidden_size": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "JetMoeConfig": GROUPED,  # as many heads of Q as heads of K and experts for a token give
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv"]},
    "Mamba2Config": {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2},
    "MiniMaxM3VLTextConfig": {
        **GROUPED,
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
    "MllamaTextConfig": {"cross_attention_layers": [1]},
    "MoonshineStreamingConfig": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "NllbMoeConfig": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "Qwen4ExpTextConfig": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "split_ngram_parts": 2,
        "eos_token_id": 11,
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "MoshiConfig": {"sliding_window": 128},  # the model's mask has no window
    "ReformerConfig": {"axial_pos_embds": False},
    "XLMConfig": {"causal": True},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": SHARED_ATTENTION,
    "ZambaConfig": SHARED_ATTENTION,
    "ZayaConfig": {"num_experts_per_tok": 1, "attention_bias": True, "cca_time1": 3},
}
