"""vLLM's layers and configuration in attnmux's words: layer specs and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs

from attnmux.core import InvalidInput, LayerSpec, Request, dtype_name, torch_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention, MLAAttention

KV_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""vLLM's names of 8-bit caches, which it keeps as bytes, and ours."""
PLAIN = ("auto", "float32", "float16", "bfloat16")


def kv_dtype(cache_dtype: str | None, dtype: torch.dtype) -> str:
    """Our name of vLLM's `kv_cache_dtype`, for a model of that dtype.

    Raises InvalidInput for a format that no KV pool has.
    """
    if cache_dtype in (None, "auto"):
        return dtype_name(dtype)
    if cache_dtype in PLAIN:
        return str(cache_dtype)
    if cache_dtype in KV_DTYPES:
        return KV_DTYPES[cache_dtype]
    expected = f"one of {', '.join((*PLAIN, *KV_DTYPES))}"
    raise InvalidInput("kv_cache_dtype", got=cache_dtype, expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What vLLM asks of a backend before the layers exist; the rest it does not say."""

    head_size: int
    dtype: torch.dtype
    cache_dtype: str | None
    block_size: int | None
    use_mla: bool
    has_sink: bool
    has_sliding_window: bool
    batch_invariant: bool

    def request(self, config: VllmConfig) -> Request:
        """Raises InvalidInput for values that no request can hold."""
        model, parallel = config.model_config, config.parallel_config
        given: dict[str, Any] = {
            "num_q_heads": model.get_num_attention_heads(parallel),
            "dtype": dtype_name(self.dtype),
            "kv_dtype": kv_dtype(self.cache_dtype, self.dtype),
            "page_size": self.block_size,
            "sinks": self.has_sink,
            "alibi": model.uses_alibi,
            "deterministic": self.batch_invariant,
            "sliding_window": _window(config) if self.has_sliding_window else None,
        }
        if self.use_mla:
            text = model.hf_text_config
            given |= {
                "kind": "mla",
                "num_kv_heads": 1,
                "head_dim": text.qk_nope_head_dim + text.qk_rope_head_dim,
                "v_head_dim": text.v_head_dim,
                "kv_lora_rank": text.kv_lora_rank,
                "qk_rope_head_dim": text.qk_rope_head_dim,
            }
        else:
            given |= {
                "num_kv_heads": model.get_num_kv_heads(parallel),
                "head_dim": self.head_size,
                "strided_kv": True,
            }
        return Request().replace(origin="model", **given)


def _window(config: VllmConfig) -> int:
    """The keys before a token that its window holds; 1 where the configuration names no window."""
    window = config.model_config.get_sliding_window()
    return window - 1 if window and window > 1 else 1


def dense_spec(layer_id: int, layer: Attention) -> LayerSpec:
    """Of an attention layer whose weights and scales are loaded."""
    impl, scales = layer.impl, _scales(layer)
    window = layer.sliding_window
    return LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=layer.num_heads,
        tp_k_head_num=layer.num_kv_heads,
        tp_v_head_num=layer.num_kv_heads,
        qk_head_dim=layer.head_size,
        v_head_dim=layer.head_size_v,
        scaling=impl.scale,
        logit_cap=impl.logits_soft_cap,
        # vLLM's window counts the token itself
        sliding_window_size=-1 if window is None else window - 1,
        sinks=None if impl.sinks is None else impl.sinks.detach().float(),
        alibi_slopes=_slopes(impl.alibi_slopes, layer.kv_cache.device),
        k_scale=scales[0],
        v_scale=scales[1],
    )


def _slopes(of_heads: Sequence[float] | None, device: torch.device) -> torch.Tensor | None:
    """ALiBi's, of this rank's heads. vLLM adds them to the scaled logits, as we do."""
    return None if of_heads is None else torch.tensor(of_heads, dtype=torch.float32, device=device)


def latent_spec(layer_id: int, layer: MLAAttention) -> LayerSpec:
    """Of a layer of latent attention, as it is called absorbed."""
    window = layer.sliding_window
    return LayerSpec(
        layer_id=layer_id,
        kind="mla",
        tp_q_head_num=layer.num_heads,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=layer.head_size,
        v_head_dim=layer.kv_lora_rank,
        scaling=layer.scale,
        sliding_window_size=-1 if window is None else window - 1,
        k_scale=_scales(layer)[0],
    )


def _scales(layer: Any) -> tuple[float | None, float | None]:  # noqa: ANN401  # either layer
    if layer.kv_cache_dtype not in KV_DTYPES:
        return None, None
    return layer._k_scale_float, layer._v_scale_float


def request_of(
    layers: Sequence[Any], specs: Sequence[LayerSpec], *, dtype: torch.dtype, page_size: int
) -> Request:
    """The needs of the layers of one KV cache group, whose heads and dims are alike.

    layers: vLLM's; specs: the same in our words. Where windows differ, the largest is asked for.
    """
    first, layer = specs[0], layers[0]
    given: dict[str, Any] = {
        "kind": first.kind,
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "dtype": dtype_name(dtype),
        "kv_dtype": kv_dtype(layer.kv_cache_dtype, dtype),
        "page_size": page_size,
        "sliding_window": max(spec.sliding_window_size for spec in specs),
        "logit_cap": max(spec.logit_cap for spec in specs) or None,
        "sinks": any(spec.sinks is not None for spec in specs),
        "alibi": any(spec.alibi_slopes is not None for spec in specs),
        "deterministic": bool(envs.VLLM_BATCH_INVARIANT),
    }
    if first.kind == "mla":
        given |= {
            "head_dim": layer.qk_head_dim,
            "v_head_dim": layer.v_head_dim,
            "kv_lora_rank": first.v_head_dim,
            "qk_rope_head_dim": first.qk_rope_head_dim,
        }
    else:
        same = first.v_head_dim == first.qk_head_dim
        given |= {
            "head_dim": first.qk_head_dim,
            "v_head_dim": None if same else first.v_head_dim,
        }
    return Request().replace(origin="model", **given)


def slots_of(cache: torch.Tensor, layer: Any) -> torch.Tensor:  # noqa: ANN401  # either layer
    """A layer's cache [blocks, block, Hkv, values] as [slots, Hkv, values] of our dtype; a view.

    Raises InvalidInput for a layout whose slots are not equally far apart.
    """
    if layer.kv_cache_dtype in KV_DTYPES:
        cache = cache.view(torch_dtype(KV_DTYPES[layer.kv_cache_dtype]))
    if cache.stride(0) != cache.shape[1] * cache.stride(1):
        raise InvalidInput(
            "KV cache",
            got=f"blocks {cache.stride(0)} values apart, of slots {cache.stride(1)} apart",
            expected="blocks without gaps: layout LBNHC",
        )
    return cache.as_strided((cache.shape[0] * cache.shape[1], *cache.shape[2:]), cache.stride()[1:])
