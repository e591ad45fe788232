"""vLLM's layers and configuration in attnmux's words: layer specs and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs

from attnmux.core import InvalidInput, LayerSpec, Request, UpProjection, torch_dtype
from attnmux.vllm.asking import KV_DTYPES, kv_dtype, of_layers, window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention, MLAAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """vLLM's facts about a backend before a layer exists. Heads, caps and V's dim are missing: the
    layers ask again."""

    head_size: int
    dtype: torch.dtype
    cache_dtype: str | None
    block_size: int | None
    use_mla: bool
    has_sink: bool
    has_sliding_window: bool
    batch_invariant: bool

    def request(self, config: VllmConfig) -> Request:
        """Raises InvalidInput for values that no request can hold, and for what is refused."""
        model, dtype = config.model_config, Request.canonical_dtype(self.dtype)
        given: dict[str, Any] = {
            "dtype": dtype,
            "kv_dtype": kv_dtype(self.cache_dtype, dtype),
            "page_size": self.block_size,
            "sinks": self.has_sink,
            "alibi": model.uses_alibi,
            "deterministic": self.batch_invariant,
        }
        if self.has_sliding_window:
            given["sliding_window"] = window(model.get_sliding_window() or 1)
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
            given["head_dim"] = self.head_size
        return of_layers(Request().replace(origin="model", **given))


def specs_of(layers: Sequence[Any], device: torch.device) -> list[LayerSpec]:
    """A spec for each of vLLM's layers, whose weights and scales are loaded; ids are places in the
    sequence."""
    return [
        latent_spec(i, layer) if is_latent(layer) else dense_spec(i, layer, device)
        for i, layer in enumerate(layers)
    ]


def is_latent(layer: Any) -> bool:  # noqa: ANN401  # either layer
    """Whether a layer of vLLM's attends to the latent of MLA."""
    return hasattr(layer, "kv_lora_rank")


def dense_spec(layer_id: int, layer: Attention, device: torch.device) -> LayerSpec:
    """Spec of a layer of MHA or GQA."""
    impl, scales = layer.impl, _scales(layer)
    return LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=layer.num_heads,
        tp_k_head_num=layer.num_kv_heads,
        tp_v_head_num=layer.num_kv_heads,
        qk_head_dim=layer.head_size,
        v_head_dim=layer.head_size_v,
        scaling=impl.scale,
        logit_cap=impl.logits_soft_cap,
        sliding_window_size=_window(layer),
        sinks=None if impl.sinks is None else impl.sinks.detach().float(),
        alibi_slopes=_slopes(impl.alibi_slopes, device),
        k_scale=scales[0],
        v_scale=scales[1],
    )


def _slopes(of_heads: Sequence[float] | None, device: torch.device) -> torch.Tensor | None:
    """ALiBi's, of this rank's heads. vLLM adds them to the scaled logits, as we do."""
    return None if of_heads is None else torch.tensor(of_heads, dtype=torch.float32, device=device)


def latent_spec(layer_id: int, layer: MLAAttention) -> LayerSpec:
    """Spec of a layer of latent attention, as it is called absorbed."""
    return LayerSpec(
        layer_id=layer_id,
        kind="mla",
        tp_q_head_num=layer.num_heads,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=layer.head_size,
        v_head_dim=layer.kv_lora_rank,
        scaling=layer.scale,
        sliding_window_size=_window(layer),
        k_scale=_scales(layer)[0],
    )


def up_projection(layer: MLAAttention) -> UpProjection:
    """A layer's weights as they are now: a trainer may have updated them."""
    return UpProjection(
        w_uk=layer.W_UK_T,
        w_uv=layer.W_UV.transpose(1, 2),
        multiply=lambda latent: layer.kv_b_proj(latent)[0],
    )


def _window(layer: Any) -> int:  # noqa: ANN401  # either layer
    """The keys before a token that it sees. vLLM's windows count the token itself."""
    return -1 if layer.sliding_window is None else layer.sliding_window - 1


def _scales(layer: Any) -> tuple[float | None, float | None]:  # noqa: ANN401  # either layer
    if layer.kv_cache_dtype not in KV_DTYPES:
        return None, None
    return layer._k_scale_float, layer._v_scale_float


def request_of(
    layers: Sequence[Any], specs: Sequence[LayerSpec], *, dtype: torch.dtype, page_size: int | None
) -> Request:
    """The needs of layers whose heads and dims are alike.

    layers: vLLM's; specs: the same in our words. If windows differ, the largest counts.
    Raises InvalidInput for what is refused.
    """
    first, layer = specs[0], layers[0]
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    given: dict[str, Any] = {
        "kind": first.kind,
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "dtype": Request.canonical_dtype(dtype),
        "kv_dtype": kv_dtype(layer.kv_cache_dtype, Request.canonical_dtype(dtype)),
        "page_size": page_size,
        "sliding_window": window(max(windows, default=None)),
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
    return of_layers(Request().replace(origin="model", **given))


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
