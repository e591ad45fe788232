"""The meaning of config fields by their names, and sizes for a small random model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.models.recipe import DimsKind

MAX_POSITIONS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """The sizes of one random model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    window: int
    experts: int
    rank: int
    rope_dim: int
    vocab: int
    has_encoder: bool = False

    @classmethod
    def drawn(cls, rng: random.Random, *, tied: bool, grouped: bool, kind: DimsKind) -> Dims:
        """tied: the hidden size is that of all heads. grouped: heads may share K and V."""
        is_small = kind == "small"
        kv_heads, head_dim = (
            rng.choice((1, 2, 3)),
            rng.choice((8, 16, 32) if is_small else (64, 128)),
        )
        heads = max(2, kv_heads * rng.choice((1, 2, 4)))
        if not grouped:
            heads = kv_heads = rng.choice((2, 4))
        return cls(
            layers=3,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=heads * head_dim if tied else rng.choice((32, 48, 64)),
            inner=rng.choice((32, 48, 64)),
            window=rng.randint(4, 9),
            experts=rng.choice((4, 6)),
            rank=rng.choice((16, 24)) if is_small else 512,
            rope_dim=rng.choice((4, 8)) if is_small else 64,
            vocab=rng.choice((97, 128, 150)),
        )


RULES: Mapping[str, Callable[[Dims], object]] = {
    **dict.fromkeys(
        [
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "num_blocks",
            "num_decoder_layers",
            "num_encoder_layers",
            "num_layers_per_stack",
            "layers",
        ],
        lambda dims: dims.layers,
    ),
    **dict.fromkeys(
        [
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_heads",
        ],
        lambda dims: dims.heads,
    ),
    **dict.fromkeys(
        [
            "num_key_value_heads",
            "num_kv_heads",
            "kv_n_heads",
            "swa_num_key_value_heads",
            "num_query_groups",
            "num_global_key_value_heads",
        ],
        lambda dims: dims.kv_heads,
    ),
    **dict.fromkeys(
        [
            "head_dim",
            "d_head",
            "d_kv",
            "dim_head",
            "kv_channels",
            "attention_head_dim",
            "attention_head_size",
            "swa_head_dim",
            "global_head_dim",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
        ],
        lambda dims: dims.head_dim,
    ),
    **dict.fromkeys(
        [
            "hidden_size",
            "embed_dim",
            "d_model",
            "n_embd",
            "emb_dim",
            "embedding_size",
            "embedding_dim",
            "input_embedding_size",
            "output_embedding_size",
            "word_embed_proj_dim",
        ],
        lambda dims: dims.hidden,
    ),
    **dict.fromkeys(
        [
            "intermediate_size",
            "n_inner",
            "d_inner",
            "ffn_dim",
            "d_ff",
            "dff",
            "dim_ff",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "ffn_hidden_size",
            "feed_forward_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "expert_ffn_hidden_size",
        ],
        lambda dims: dims.inner,
    ),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "shared_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
        ],
        lambda dims: 16,
    ),
    **dict.fromkeys(
        [
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_target_positions",
            "max_source_positions",
            "context_length",
            "model_max_length",
            "original_max_position_embeddings",
        ],
        lambda dims: MAX_POSITIONS,
    ),
    **dict.fromkeys(
        [
            "sliding_window",
            "window_size",
            "attention_window_size",
            "sliding_window_size",
            "local_attention",
            "attention_chunk_size",
            "keep_window_size",
        ],
        lambda dims: dims.window,
    ),
    **dict.fromkeys(
        ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"],
        lambda dims: dims.experts,
    ),
    **dict.fromkeys(
        [
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "moe_top_k",
            "top_k_experts",
        ],
        lambda dims: 2,
    ),
    **dict.fromkeys(
        [
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "n_group",
            "topk_group",
            "num_expert_group",
            "first_k_dense_replace",
            "num_dense_layers",
            "zero_expert_num",
        ],
        lambda dims: 1,
    ),
    **dict.fromkeys(
        [
            "kv_lora_rank",
            "q_lora_rank",
            "o_lora_rank",
            "laurel_rank",
            "hc_lowrank",
            "gated_norm_rank",
            "router_hidden_size",
        ],
        lambda dims: dims.rank,
    ),
    **dict.fromkeys(
        ["qk_rope_head_dim", "rotary_dim", "swa_rope_head_dim"], lambda dims: dims.rope_dim
    ),
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim"], lambda dims: dims.head_dim),
    **dict.fromkeys(["linear_num_key_heads", "n_mamba_heads"], lambda dims: 2),
    **dict.fromkeys(["linear_num_value_heads"], lambda dims: 4),
    **dict.fromkeys(
        ["mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size", "chunk_size"],
        lambda dims: 16,
    ),
    **dict.fromkeys(
        ["relative_attention_num_buckets"],
        lambda dims: 8,
    ),
    "relative_attention_max_distance": lambda dims: 11,
    "vocab_size": lambda dims: dims.vocab,
    "decoder_vocab_size": lambda dims: dims.vocab,
    "is_decoder": lambda dims: True,
    "use_sliding_window": lambda dims: True,
    "max_window_layers": lambda dims: 1,
    "attention_dropout": lambda dims: 0.0,
}
"""The value of a field, wherever it occurs with a value that is not None."""

OFTEN_NONE = frozenset({"num_key_value_heads", "num_kv_heads", "head_dim"})
"""Fields that get their value also where their default is None."""

ROPE_THETA = 10_000.0

TOWER: Mapping[str, object] = {
    **dict.fromkeys(["hidden_size", "embed_dim", "output_dim", "out_hidden_size", "d_model"], 32),
    **dict.fromkeys(["intermediate_size", "encoder_ffn_dim", "mlp_dim"], 32),
    **dict.fromkeys(
        ["num_hidden_layers", "depth", "encoder_layers", "num_blocks", "decoder_layers"], 1
    ),
    **dict.fromkeys(
        ["num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"], 2
    ),
    **dict.fromkeys(["head_dim"], 16),
}
"""The same for the towers of images and sounds, which never run."""
