"""sgl-kernel-xpu's flash attention for MHA and GQA: one call of `fwd` a layer, over pages.

The operator's soft cap and LSE are arguments and results that no kernel computes: neither is
offered. A window counts keys before the query, inclusive. Sinks have the dtype of the queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnmux.core import InvalidInput
from attnmux.core.plugin import LibraryBackend, PagedLayer
from attnmux.intel.packed_pages import Operands, PackedPagesBackend
from attnmux.intel.packed_steps import PackedStep
from attnmux.intel.xpu_library import XPUKernels

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch, LayerSpec

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


class XPUPagesBackend(PackedPagesBackend[XPUKernels]):
    """MHA and GQA, prefill and decode."""

    def check(self, layer: LayerSpec) -> None:
        _check_layer(layer)
        self.context.check_page_size(*PAGE_SIZES)

    def arguments(self, layer: LayerSpec) -> dict[str, Any]:
        dtype, window = self.context.token_to_kv_pool.dtype, layer.sliding_window_size
        return {
            "softmax_scale": layer.scaling,
            "sinks": layer.sinks_in(dtype),
            "is_causal": True,
            "window_size_left": window,
            "window_size_right": 0 if window >= 0 else -1,
            # 0 splits keys by what else is in the batch.
            "num_kv_splits": 1 if self.context.request.deterministic else 0,
            **NOT_USED,
        }

    def plan_step(self, batch: ForwardBatch, buffers: None) -> PackedStep:
        if batch.forward_mode.is_target_verify():
            raise InvalidInput("forward_mode", got="TARGET_VERIFY", expected="EXTEND or DECODE")
        return super().plan_step(batch, buffers)

    def launch(self, operands: Operands, layer: PagedLayer, step: PackedStep) -> None:
        self.kernels.fwd(
            q=operands.q,
            k=operands.k,
            v=operands.v,
            page_table=operands.keys.page_table,
            cu_seqlens_q=operands.bounds,
            cu_seqlens_k=operands.keys.lens,
            max_seqlen_q=LibraryBackend.filled(step.requests).longest,
            max_seqlen_k=step.tables.max_seqlen_k,
            out=operands.out,
            **layer.arguments,
        )


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
