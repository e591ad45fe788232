"""torch-npu's operators over latents: MLA with a latent of 512 and a rotary part of 64, absorbed.

Decode is `_npu_paged_attention_mla`, which reads the pool's joint rows where they are. Other steps
are `npu_fused_infer_attention_score_v2`, which wants latents and rotary parts apart: it reads
copies of the step's pages, in chunks of 16 queries (`chunks.py`). Neither gives an LSE: the first
has none, and with a latent the second has none in layout TND.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnmux.ascend.chunks import Chunks
from attnmux.ascend.host_lens import HostLens
from attnmux.ascend.npu_kernels import (
    CAUSAL,
    INT32,
    NO_MASK,
    NPUKernels,
    causal_mask,
)
from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import KeyGroup, LatentRows, PagedBackend, PageTables

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

PAGE_SIZES = (128, 16)
"""Page sizes of the second operator with a latent; the first takes multiples of 16 up to 128."""
MOST_HEADS = 128
"""Heads of both operators, at most; the second takes powers of two, to which fewer heads are
padded."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentLayer:
    """A layer as the operators take it."""

    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    cache: torch.Tensor | None = None
    """[pages, page, 1, 576], the pool's memory."""


@dataclass(kw_only=True, slots=True, eq=False)
class LatentStep:
    """A step of any phase."""

    tables: PageTables
    lens: HostLens
    context_lens: torch.Tensor | None = None
    """[B] int32 on the host, in decode."""
    chunks: Chunks | None = None
    """In other steps that have new tokens."""


class AscendLatentBackend(PagedBackend[NPUKernels, LatentLayer, LatentStep, None]):
    """MLA; draft trees are another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: NPUKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the operators do not serve."""
        super().__init__(context, options, kernels)
        self._mask = causal_mask(context.device)

    def prepare_layer(self, layer: LayerSpec) -> LatentLayer:
        LatentRows.check(layer)
        if layer.tp_q_head_num > MOST_HEADS:
            got, expected = f"{layer.tp_q_head_num} heads", f"at most {MOST_HEADS}"
            raise InvalidInput(f"layer {layer.layer_id}", got=got, expected=expected)
        self.context.check_page_size(*PAGE_SIZES)
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return LatentLayer()
        self.context.check_sixteen_bits()
        cache = self.context.latent_pages(layer, pool.page_size)
        if not cache.is_contiguous() or cache.numel() > INT32:
            raise InvalidInput(
                "token_to_kv_pool",
                got=f"{cache.numel()} numbers with strides {cache.stride()}",
                expected=f"latents without gaps, at most {INT32} numbers in all",
            )
        return LatentLayer(group=KeyGroup.of(layer, self.context), cache=cache)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> LatentStep:
        lens = HostLens.of(batch)
        step = LatentStep(tables=PageTables.of(batch, self.context, {}), lens=lens)
        if batch.forward_mode.is_decode():
            step.context_lens = torch.tensor(lens.at_least_one_key, dtype=torch.int32)
        elif lens.num_queries:
            step.chunks = self._chunks(lens)
        return step

    def fill_step(self, step: LatentStep, batch: ForwardBatch) -> None:
        step.tables.fill(batch, self.key_groups, self.context)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported(
            "_npu_paged_attention_mla takes lengths from the host, and torch-npu renews those of "
            "other operators only: run eagerly"
        )

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput(
            "lse", got="a tensor", expected="None: over latents the operators give none"
        )

    def attend(
        self, call: AttentionCall, layer: LatentLayer, step: LatentStep, batch: ForwardBatch
    ) -> torch.Tensor:
        if not step.lens.num_queries:
            return call.empty_result()
        if call.has_own_kv:
            return self._over_own_keys(call, step)
        if layer.cache is None or layer.group is None:
            raise call.layer.not_in_pool()
        page_table = step.tables.keys[layer.group].page_table
        if step.context_lens is not None:
            return self._decode(call, layer.cache, page_table, step.context_lens, step.lens)
        if step.chunks is None:
            raise call.layer.not_in_pool()
        pages = step.chunks.copied(layer.cache.squeeze(2), page_table)
        return self._extend(call, pages, step.chunks)

    def _decode(
        self,
        call: AttentionCall,
        cache: torch.Tensor,
        page_table: torch.Tensor,
        context_lens: torch.Tensor,
        lens: HostLens,
    ) -> torch.Tensor:
        q = LatentRows.joined(call.q, call.q_rope).contiguous()
        out = call.out
        if out is None or not out.is_contiguous():
            out = q.new_empty((*q.shape[:2], LatentRows.LATENT_DIM))
        self.kernels.paged_attention_mla(
            query=q,
            key_cache=cache,
            num_kv_heads=1,
            num_heads=q.shape[1],
            scale_value=call.layer.scaling,
            block_table=page_table.contiguous(),
            context_lens=context_lens,
            mla_vheadsize=LatentRows.LATENT_DIM,
            out=out,
        )
        if lens.rows_without_keys:
            out[lens.rows_without_keys] = 0
        return out

    def _extend(self, call: AttentionCall, pages: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """pages: [copied pages, page, 576]."""
        rows, heads, count = call.q.shape[0], call.q.shape[1], chunks.bounds[-1]
        more = (1 << (heads - 1).bit_length()) - heads
        q, q_rope = (
            pad(tensor[:count], (0, 0, 0, more)).contiguous()
            for tensor in (call.q, call.rotary_queries())
        )
        latents = pages[..., : LatentRows.LATENT_DIM].contiguous()
        is_causal = not chunks.has_one_query_each
        out, _ = self.kernels.fused_infer_attention_score(
            q,
            key=latents,
            value=latents,
            query_rope=q_rope,
            key_rope=pages[..., LatentRows.LATENT_DIM :].contiguous(),
            num_query_heads=heads + more,
            num_key_value_heads=1,
            softmax_scale=call.layer.scaling,
            input_layout="TND",
            block_table=chunks.table,
            block_size=pages.shape[1],
            actual_seq_qlen=chunks.bounds,
            actual_seq_kvlen=chunks.keys,
            atten_mask=self._mask if is_causal else None,
            sparse_mode=CAUSAL if is_causal else NO_MASK,
        )
        out = out[:, :heads]
        return out if count == rows else pad(out, (0, 0, 0, 0, 0, rows - count))

    def _over_own_keys(self, call: AttentionCall, step: LatentStep) -> torch.Tensor:
        """The call's K are all keys: they are copied to pages."""
        own_keys = call.own_keys(call.k_rope)
        chunks = self._chunks(replace(step.lens, keys=step.lens.new))
        count = step.lens.num_queries
        rows = torch.cat([rows[:count] for rows in own_keys], dim=-1).squeeze(1)
        page_size = self.context.token_to_kv_pool.page_size
        return self._extend(call, chunks.filled(rows, page_size), chunks)

    def _chunks(self, lens: HostLens) -> Chunks:
        page_size = self.context.token_to_kv_pool.page_size
        return Chunks.of(lens, page_size, self.context.device)
