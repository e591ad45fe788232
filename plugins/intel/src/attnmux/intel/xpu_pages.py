"""sgl-kernel-xpu's flash attention for MHA and GQA: one call of `fwd` a layer, over pages.

The operator's soft cap and LSE are arguments and results that no kernel computes: neither is
offered. A window counts keys before the query, inclusive. Sinks have the dtype of the queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import (
    DecodeStep,
    GraphUnsupported,
    InvalidInput,
    KeyGroup,
    Keys,
    LibraryBackend,
    aligned,
    check_keys_dtype,
    check_page_size,
    check_sixteen_bits,
    filled,
    is_writable,
    kv_pages,
    not_in_pool,
)
from attnmux.intel.packed_requests import PackedRequests
from attnmux.intel.xpu_library import XPUKernels

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

PAGE_SIZES = (128, 64)
"""That the kernels for decode are built for."""
HEAD_DIMS = (64, 96, 128, 192, 256, 512)
SINK_DIM = 64
MOST_GROUP = 16
NOT_USED: dict[str, Any] = {
    **dict.fromkeys(("q_v", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin")),
    **dict.fromkeys(("seqlens_rotary", "q_descale", "k_descale", "v_descale")),
    **dict.fromkeys(("scheduler_metadata", "pack_gqa")),
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
}
"""Arguments without a default."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class XPULayer:
    """A layer's arguments that no step changes."""

    arguments: dict[str, Any]
    """Of `fwd`, by its names."""
    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    """[pages, page, Hkv, D], the pool's memory."""


@dataclass(kw_only=True, slots=True, eq=False)
class XPUStep(DecodeStep):
    """A step of any phase."""

    requests: PackedRequests | None = None
    """Set by `plan_step`."""


class XPUPagesBackend(LibraryBackend[XPUKernels, XPULayer, XPUStep, None]):
    """MHA and GQA, prefill and decode."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: XPUKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options, kernels)
        groups = (layer.group for layer in self._layers.values() if layer.group is not None)
        self._groups = tuple(dict.fromkeys(groups))
        # 0 splits keys by what else is in the batch.
        self._splits = 1 if context.request.deterministic else 0

    def prepare_layer(self, layer: LayerSpec) -> XPULayer:
        _check_layer(layer)
        check_page_size(self.context, *PAGE_SIZES)
        check_sixteen_bits(self.context)
        pool, window = self.context.token_to_kv_pool, layer.sliding_window_size
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "sinks": None if layer.sinks is None else layer.sinks.to(pool.dtype),
            "is_causal": True,
            "window_size_left": window,
            "window_size_right": 0 if window >= 0 else -1,
        }
        if layer.layer_id not in pool.layer_ids:
            return XPULayer(arguments=arguments)
        group = KeyGroup.of(layer, self.context)
        kv = kv_pages(layer, self.context, group.page_size)
        return XPULayer(arguments=arguments, group=group, kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> XPUStep:
        if batch.forward_mode.is_target_verify():
            raise InvalidInput("forward_mode", got="TARGET_VERIFY", expected="EXTEND or DECODE")
        step = XPUStep.of(batch, self.context, None)
        step.requests = PackedRequests.of(batch)
        return step

    def fill_step(self, step: XPUStep, batch: ForwardBatch) -> None:
        step.fill(batch, self._groups, self.context)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported("graphs of Intel's GPUs are not captured")

    def attend(
        self, call: AttentionCall, layer: XPULayer, step: XPUStep, batch: ForwardBatch
    ) -> torch.Tensor:
        requests, pool = filled(step.requests), self.context.token_to_kv_pool
        if call.lse is not None:
            raise InvalidInput("lse", got="a tensor", expected="None: the kernels write none")
        if call.q.dtype != pool.dtype:
            raise InvalidInput("q", got=call.q.dtype, expected=f"{pool.dtype}, as the pool is")
        count = requests.num_queries
        if not count:
            return call.empty_result()
        keys, (k, v) = self._keys(call, layer, step, requests)
        out = call.out
        if out is None or not is_writable(out):
            out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        self.kernels.fwd(
            q=aligned(call.q[:count].contiguous()),
            k=k,
            v=v,
            page_table=keys.page_table,
            cu_seqlens_q=requests.bounds(step.tables.query_bounds(out.device)),
            cu_seqlens_k=keys.lens,
            max_seqlen_q=requests.longest,
            max_seqlen_k=step.tables.max_seqlen_k,
            num_kv_splits=self._splits,
            out=out[:count],
            **layer.arguments,
            **NOT_USED,
        )
        if batch.forward_mode.is_decode():
            step.replace_empty(out)
        out[count:] = 0
        return out

    def _keys(
        self, call: AttentionCall, layer: XPULayer, step: XPUStep, requests: PackedRequests
    ) -> tuple[Keys, tuple[torch.Tensor, ...]]:
        if call.has_own_kv:
            if call.k is None or call.v is None:
                raise not_in_pool(call.layer)
            check_keys_dtype(call.q, call.k, call.v)
            page_size = self.context.token_to_kv_pool.page_size
            return requests.own_pages(page_size, page_size, call.k, call.v)
        if layer.group is None or layer.kv is None:
            raise not_in_pool(call.layer)
        return requests.keys(filled(step.keys)[layer.group]), layer.kv


def _check_layer(layer: LayerSpec) -> None:
    dims, group = (layer.qk_head_dim, layer.v_head_dim), layer.tp_q_head_num // layer.tp_k_head_num
    unserved = {
        f"kind {layer.kind}": layer.kind != "mha",
        f"dims {dims[0]} and {dims[1]}": dims not in [(dim, dim) for dim in HEAD_DIMS],
        f"{group} query heads a KV head": group > MOST_GROUP,
        "is_causal=False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        "attention_chunk_size": layer.attention_chunk_size > 0,
        "logit_cap": layer.logit_cap > 0,
        f"sinks with dims of {dims[0]}": layer.sinks is not None and dims[0] != SINK_DIM,
    }
    got = [name for name, is_set in unserved.items() if is_set]
    if got:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(got),
            expected=f"causal mha; K and V of one dim of {', '.join(map(str, HEAD_DIMS))}; at most "
            f"{MOST_GROUP} heads a KV head; no cap or chunks; sinks with dims of {SINK_DIM}",
        )
