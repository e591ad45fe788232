"""AITER's unified attention: MHA and GQA over pages, prefill and decode by one function.

It returns no LSE and takes no mask. If a layer's call brings all keys, as an encoder's does,
`extend_attention_fwd` reads them in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.amd.aiter_kernels import AiterKernels
from attnmux.core import InvalidInput
from attnmux.core.plugin import (
    DecodeBuffers,
    DecodeStep,
    KeyGroup,
    LibraryBackend,
    PagedBackend,
    PagedLayer,
)

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, ForwardBatch, LayerSpec

PAGE_SIZES = (16, 32, 64, 128)
"""A page is a tile of the kernel in decode: a power of two that its matrix units divide."""
HEAD_DIMS = (16, 32, 64, 128, 256)
"""`reduce_segments` of 0.1.7 compiles for powers of two alone."""
KEY_TILE = 64
"""Keys of a tile in prefill. The kernel reads the table for all of them."""


@dataclass(kw_only=True, slots=True, eq=False)
class AiterStep(DecodeStep):
    """A step of any phase."""

    unowned: torch.Tensor | None = None
    """[T, 1, 1] bool: the rows of no request. Set by `fill_step` if there may be one."""


class AiterPagesBackend(PagedBackend[AiterKernels, PagedLayer, AiterStep, DecodeBuffers]):
    """MHA and GQA; draft trees are another backend's."""

    def prepare_layer(self, layer: LayerSpec) -> PagedLayer:
        is_encoders = not layer.is_causal
        _check_layer(layer)
        window = layer.sliding_window_size
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": True,
            "window_size": (window, 0) if window >= 0 else (-1, -1),
            "softcap": layer.logit_cap,
            "sinks": layer.sinks,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
        }
        if is_encoders or layer.layer_id not in self.context.token_to_kv_pool.layer_ids:
            return PagedLayer(arguments=arguments)
        self.context.check_sixteen_bits()
        self.context.check_page_size(*PAGE_SIZES)
        _check_dims(layer)
        group = KeyGroup.of(layer, self.context)
        kv = self.context.kv_pages(layer, group.page_size)
        return PagedLayer(arguments=arguments, group=group, kv=kv)

    def plan_step(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> AiterStep:
        return AiterStep.of(batch, self.context, buffers, key_tile=KEY_TILE)

    def fill_step(self, step: AiterStep, batch: ForwardBatch) -> None:
        step.fill(batch, self.key_groups, self.context)
        if step.tables.queries_each is None:
            step.unowned = step.tables.unowned_rows(batch)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> DecodeBuffers:
        return DecodeBuffers.of(self.key_groups, max_bs, self.context, key_tile=KEY_TILE)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the library gives no LSE")

    def attend(
        self, call: AttentionCall, layer: PagedLayer, step: AiterStep, batch: ForwardBatch
    ) -> torch.Tensor:
        spec, q = call.layer, call.q
        out = call.out
        if out is None:
            out = q.new_empty((q.shape[0], spec.tp_q_head_num, spec.v_head_dim))
        if call.has_own_kv:
            self._over_own_keys(call, out, step)
        else:
            self._over_pool(call, out, layer, step)
            step.replace_empty(out)
        return out if step.unowned is None else out.masked_fill_(step.unowned, 0)

    def _over_pool(
        self, call: AttentionCall, out: torch.Tensor, layer: PagedLayer, step: AiterStep
    ) -> None:
        if layer.group is None or layer.kv is None:
            raise call.layer.not_in_pool()
        keys, tables = LibraryBackend.filled(step.keys)[layer.group], step.tables
        self.kernels.unified_attention(
            q=call.q,
            k=layer.kv[0],
            v=layer.kv[1],
            out=out,
            cu_seqlens_q=tables.query_bounds(out.device),
            max_seqlen_q=tables.max_seqlen_q,
            seqused_k=keys.lens,
            max_seqlen_k=tables.max_seqlen_k,
            block_table=keys.page_table,
            **layer.arguments,
        )

    def _over_own_keys(self, call: AttentionCall, out: torch.Tensor, step: AiterStep) -> None:
        spec, k, v = call.layer, call.k, call.v
        if k is None or v is None:
            raise spec.not_in_pool()
        if spec.sliding_window_size >= 0 or spec.sinks is not None:
            raise InvalidInput(
                "save_kv_cache",
                got="False for a layer with a window or sinks",
                expected="True: the kernel for keys of the call does neither",
            )
        call.check_keys_dtype(k, v)
        bounds = step.tables.query_bounds(out.device)
        self.kernels.extend_attention_fwd(
            q_extend=call.q,
            k_extend=k,
            v_extend=v,
            o_extend=out,
            k_buffer=k,
            v_buffer=v,
            qo_indptr=bounds,
            kv_indptr=torch.zeros_like(bounds),
            kv_indices=bounds,
            custom_mask=None,
            is_causal=spec.is_causal,
            mask_indptr=None,
            max_len_extend=step.tables.max_seqlen_q,
            sm_scale=spec.scaling,
            logit_cap=spec.logit_cap,
        )


def _check_layer(layer: LayerSpec) -> None:
    unserved = {
        f"kind {layer.kind}": layer.kind != "mha",
        "is_cross_attention": layer.is_cross_attention,
        "attention_chunk_size": layer.attention_chunk_size > 0,
    }
    got = [name for name, is_set in unserved.items() if is_set]
    if got:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(got),
            expected="mha: self-attention to all keys or to a causal window",
        )


def _check_dims(layer: LayerSpec) -> None:
    if layer.qk_head_dim != layer.v_head_dim or layer.qk_head_dim not in HEAD_DIMS:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=f"dims {layer.qk_head_dim} and {layer.v_head_dim}",
            expected=f"K and V of one dim, of {', '.join(map(str, HEAD_DIMS))}",
        )
