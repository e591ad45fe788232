"""Facts that a config.json leaves to its model type: defaults, different names, sinks.

Source: the config classes of transformers 5.23; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
QWEN = {"num_attention_heads": 32, "num_key_value_heads": 32, "use_sliding_window": False}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
BASE = {"num_attention_heads": 12, "hidden_size": 768}
T5 = {"num_heads": 6, "d_kv": 64, "is_encoder_decoder": True}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_attention_heads": 32, "hidden_size": 4096},
    "llama4_text": {
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    },
    "qwen2": {**QWEN, "hidden_size": 4096, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {**QWEN, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "mistral": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "sliding_window": 4096,
    },
    "gemma2": {**GEMMA, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
    "gemma3_text": {**GEMMA, "sliding_window": 4096},
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "deepseek_v2": {**DEEPSEEK, "num_attention_heads": 32},
    "deepseek_v3": {**DEEPSEEK, "num_attention_heads": 128},
    "deepseek_v4": {
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "sliding_window": 128,
    },
    "bert": BASE,
    "roberta": BASE,
    "vit": BASE,
    "clip_vision_model": BASE,
    "siglip_vision_model": BASE,
    "siglip_text_model": BASE,
    "clip_text_model": {"num_attention_heads": 8, "hidden_size": 512},
    "t5": {**T5, "num_heads": 8},
    "mt5": T5,
    "umt5": T5,
    "switch_transformers": {**T5, "num_heads": 12},
    "falcon": {"multi_query": True},
    "gpt_bigcode": {"multi_query": True},
    "idefics": {"cross_layer_interval": 1},
    "mimo_v2_flash": {
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
    },
}
"""Each model type's defaults: a config.json may hold only values that differ from its class's
defaults, as Gemma 3's does."""

GPT2 = {"num_attention_heads": "n_head", "hidden_size": "n_embd"}
BART = {"num_attention_heads": "decoder_attention_heads", "hidden_size": "d_model"}
T5_NAMES = {"num_attention_heads": "num_heads", "hidden_size": "d_model", "head_dim": "d_kv"}
ZAMBA = {"head_dim": "attention_head_dim"}

NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode", "codegen", "openai-gpt"), GPT2),
    **dict.fromkeys(
        ("bart", "blenderbot", "m2m_100", "marian", "mbart", "pegasus", "whisper"), BART
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers"), T5_NAMES),
    **dict.fromkeys(("zamba", "zamba2"), ZAMBA),
    "distilbert": {"num_attention_heads": "n_heads", "hidden_size": "dim"},
    "bloom": {"num_attention_heads": "n_head", "hidden_size": "n_embed"},
    "mpt": {"num_attention_heads": "n_heads", "hidden_size": "d_model"},
    "falcon": {"num_key_value_heads": "num_kv_heads"},
    "jetmoe": {"head_dim": "kv_channels"},
    "recurrent_gemma": {"sliding_window": "attention_window_size"},
}
"""The usual name of a value → the model type's own name."""

UNSAYABLE: Mapping[str, str] = {
    **dict.fromkeys(
        ("deberta", "deberta-v2"), "relative position biases that depend on queries and keys"
    ),
    "doge": "a bias for each key",
    "longt5": "relative position biases and windows in both directions",
    "modernbert": "windows in both directions",
}
"""Model types with attention that a request cannot express, and what it cannot."""

ENCODERS = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert"),
        *("ernie", "esm", "mpnet", "deberta", "deberta-v2", "modernbert"),
        *("vit", "deit", "dinov2", "clip", "clip_text_model", "clip_vision_model"),
        *("siglip", "siglip_text_model", "siglip_vision_model"),
    }
)
"""Model types that encode whole sequences. One that sets `is_decoder` decodes."""

ALIBI = frozenset({"bloom", "mpt"})
"""Model types whose logits have a bias by distance, unless their `attn_config` says that they do
not. Others have it where config.json sets `alibi`."""

RELATIVE = frozenset({"mpnet", "mt5", "switch_transformers", "t5", "umt5"})
"""Model types whose logits have relative position biases. These are weights."""

SINKS = frozenset(
    {
        *("deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4"),
        "mimo_v2_flash",
    }
)
"""Model types whose attention has sinks. These are weights: a config.json does not list them."""

WINDOW_SINKS = frozenset({"mimo_v2_flash"})
"""Of these, model types whose windowed layers alone have sinks."""

WINDOW_KV_HEADS: Mapping[str, int] = {"mimo_v2_flash": 2}
"""How many times the KV heads of other layers the windowed ones have, where config.json does not
state theirs."""
