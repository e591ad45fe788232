"""Models with random weights that the engines are timed on: configs in transformers' words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import DeepseekV2Config, GptOssConfig, LlamaConfig, PreTrainedConfig

LONGEST = 131072
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 32.0},
    **{"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
}

NO_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "n_group": 1},
    **{"topk_group": 1, "topk_method": "greedy", "moe_intermediate_size": 128, "moe_layer_freq": 1},
}
"""Fields that the engines read of a model without a layer of experts."""


def llama(tiny: bool) -> PreTrainedConfig:
    """Llama 3.1 8B."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        **_sizes(tiny, layers=32, hidden=4096, intermediate=14336),
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        head_dim=32 if tiny else 128,
    )


def windows(tiny: bool) -> PreTrainedConfig:
    """The attention of gpt-oss 20B: windows in every other layer, and sinks. It has 8 experts
    instead of 32, so that two engines fit on a device."""
    sizes = _sizes(tiny, layers=24, hidden=2880, intermediate=2880)
    layers = sizes["num_hidden_layers"]
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        **sizes,
        num_attention_heads=4 if tiny else 64,
        num_key_value_heads=2 if tiny else 8,
        head_dim=32 if tiny else 64,
        num_local_experts=2 if tiny else 8,
        num_experts_per_tok=1 if tiny else 4,
        sliding_window=24 if tiny else 128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        rope_parameters=YARN,
    )


def latent(tiny: bool) -> PreTrainedConfig:
    """The attention of DeepSeek V2 Lite, MLA of 16 heads, with a dense layer's products in all."""
    sizes = _sizes(tiny, layers=27, hidden=2048, intermediate=10944)
    return DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"],
        **sizes,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=4 if tiny else 16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32 if tiny else 128,
        qk_rope_head_dim=64,
        v_head_dim=32 if tiny else 128,
        first_k_dense_replace=sizes["num_hidden_layers"],
        **NO_EXPERTS,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    )


MODELS: Mapping[str, Callable[[bool], PreTrainedConfig]] = {
    "llama": llama,
    "windows": windows,
    "latent": latent,
}


def cached_bytes(config: PreTrainedConfig, itemsize: int) -> int:
    """Bytes of a token's K and V in all layers, or of its latents, of values of `itemsize`."""
    rank = getattr(config, "kv_lora_rank", None)
    row = (
        rank + config.qk_rope_head_dim if rank else 2 * config.num_key_value_heads * config.head_dim
    )
    return int(config.num_hidden_layers * row * itemsize)


def _sizes(tiny: bool, *, layers: int, hidden: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2 if tiny else layers,
        "hidden_size": 128 if tiny else hidden,
        "intermediate_size": 256 if tiny else intermediate,
        "vocab_size": 1024 if tiny else 128256,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
