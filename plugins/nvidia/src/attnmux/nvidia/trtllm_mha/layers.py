"""The kernels, their arguments for a layer, and the halves that prepare steps for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import KeyGroup

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.core.plugin import DecodeBuffers


@dataclass(frozen=True, kw_only=True, slots=True)
class TRTLLMMHAKernels:
    """Functions of `flashinfer.decode` and `flashinfer.prefill`, each for some devices."""

    xqa_batch_decode_with_kv_cache: Callable[..., Any]
    """Decode and verify on SM90 and SM120."""
    trtllm_batch_decode_with_kv_cache: Callable[..., Any]
    """Decode and verify on SM100."""
    trtllm_fmha_v2_prefill: Callable[..., Any]
    """Prefill on SM90 and SM120."""
    trtllm_batch_context_with_kv_cache: Callable[..., Any]
    """Prefill on SM100."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TRTLLMMHALayer:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    group: KeyGroup
    kv: tuple[torch.Tensor, torch.Tensor]
    """K and V, [pages, page, Hkv, D], the pool's memory."""
    bmm1_scale: float
    """Scale of the logits, de-quantisation included."""
    arguments: dict[str, Any]
    """For the functions that read the pool's pages, by the library's names. In all of them a window
    is the number of keys before a token, as in the contract."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> TRTLLMMHALayer:
        """Raises InvalidInput for a layer that no kernel serves or that the pool does not store."""
        _check(layer, context)
        pool = context.token_to_kv_pool
        k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
        k_cache, v_cache = context.kv_pages(layer, pool.page_size)
        bmm1_scale = layer.scaling * k_scale
        return cls(
            layer=layer,
            group=KeyGroup.of(layer, context),
            kv=(k_cache, v_cache),
            bmm1_scale=bmm1_scale,
            arguments={
                "bmm1_scale": bmm1_scale,
                "bmm2_scale": v_scale,
                "window_left": layer.sliding_window_size,
                "sinks": layer.sinks,
                "kv_layout": "NHD",
            },
        )


class Half(ABC):
    """Prepares and runs steps of some modes, with the kernels of one kind of device."""

    def __init__(
        self,
        kernels: TRTLLMMHAKernels,
        context: BackendContext,
        layers: tuple[TRTLLMMHALayer, ...],
        workspace: torch.Tensor,
    ) -> None:
        self._kernels = kernels
        self._context = context
        self._groups = tuple(dict.fromkeys(layer.group for layer in layers))
        self._workspace = workspace

    @abstractmethod
    def plan(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> None:
        """Decide the step's shape on the host. Raises GraphUnsupported and InvalidInput."""

    @abstractmethod
    def fill(self, batch: ForwardBatch) -> None:
        """Build tables and lengths by device operations of static shape."""

    @abstractmethod
    def attend(self, q: torch.Tensor, layer: TRTLLMMHALayer, out: torch.Tensor) -> None:
        """Write `out`. q: [T, Hq, D], T > 0. out: [T, Hq, D], contiguous."""


def _check(layer: LayerSpec, context: BackendContext) -> None:
    extras = {
        f"kind {layer.kind}": layer.kind != "mha",
        "is_cross_attention": layer.is_cross_attention,
        "is_causal=False": not layer.is_causal,
        "logit_cap": layer.logit_cap > 0,
        "attention_chunk_size": layer.attention_chunk_size > 0,
        f"dims {layer.qk_head_dim} and {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
        "no place in the KV pool": layer.layer_id not in context.token_to_kv_pool.layer_ids,
    }
    unserved = [name for name, is_set in extras.items() if is_set]
    if unserved:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(unserved),
            expected="causal self-attention over the pool, one head dim, without cap and chunks",
        )
