"""AITER's Triton kernels over latents: MLA by the slots of its keys, whatever the page size.

Decode is `decode_attention_fwd_grouped_rope`, which splits keys. Other steps are
`extend_attention_fwd`: cached rows by their slots, then the new tokens' own rows, under the mask of
a draft tree if there is one. Neither returns LSE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.amd.aiter_kernels import AiterKernels
from attnmux.amd.slot_lists import SlotBuffers, SlotLists, slot_groups, slot_lists, without_keys
from attnmux.core import InvalidInput
from attnmux.core.plugin import LatentRows, LibraryBackend, PageTables, mask_indptr

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

HEADS = 16
"""Heads of a program in decode."""
PROGRAMS = 512
"""Programs that splitting the keys of decode may lead to: about two for each of the compute units
of an MI300X (304) or MI350X (256)."""
MOST_SPLITS = 32
INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentLayer:
    """A layer as the kernels take it."""

    group: int
    """The result of `KVPool.group_of`."""
    rows: torch.Tensor | None
    """[slots, 1, 576], the pool's memory; None for a layer that it does not store."""


@dataclass(kw_only=True, slots=True, eq=False)
class LatentStep:
    """A step of any phase."""

    tables: PageTables
    """Its shape and the bounds of queries; no tables."""
    buffers: LatentBuffers | None
    cached: dict[int, SlotLists] | None = None
    """By group of the pool; set by `fill_step`, as all that follows."""
    hidden: torch.Tensor | None = None
    """[T, 1, 1] bool: rows whose result is 0, which see no key or belong to no request."""
    mask: torch.Tensor | None = None
    """Flat, of a draft tree."""
    mask_indptr: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentBuffers:
    """Fixed tensors that graphs replay with."""

    slots: SlotBuffers
    mask_indptr: torch.Tensor
    """[max_bs + 1] int32."""


class AiterLatentBackend(LibraryBackend[AiterKernels, LatentLayer, LatentStep, LatentBuffers]):
    """MLA with a latent of 512 and a rotary part of 64, in absorbed form."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: AiterKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options, kernels)
        self._groups = slot_groups(context)
        stored = [layer.rows for layer in self._layers.values() if layer.rows is not None]
        # The kernels multiply a slot by the length of a row in the slot's own width.
        far = any(rows.shape[0] * rows.stride(0) > INT32 for rows in stored)
        self._slot_dtype = torch.int64 if far else torch.int32

    def prepare_layer(self, layer: LayerSpec) -> LatentLayer:
        LatentRows.check(layer)
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return LatentLayer(group=-1, rows=None)
        self.context.check_sixteen_bits()
        rows = self.context.latent_pages(layer, 1).squeeze(1)
        return LatentLayer(group=pool.group_of(layer.layer_id), rows=rows)

    def plan_step(self, batch: ForwardBatch, buffers: LatentBuffers | None) -> LatentStep:
        return LatentStep(
            tables=PageTables.of(batch, self.context, {}, trees=True), buffers=buffers
        )

    def fill_step(self, step: LatentStep, batch: ForwardBatch) -> None:
        tables, buffers = step.tables, step.buffers
        tables.fill(batch, (), self.context)
        of_slots = buffers.slots if buffers else None
        step.cached = slot_lists(batch, self.context, self._groups, of_slots, self._slot_dtype)
        if batch.forward_mode.is_decode():
            step.hidden = without_keys(batch, of_slots)
        elif tables.queries_each is None:
            step.hidden = tables.unowned_rows(batch)
        spec = batch.spec_info
        if tables.is_tree and spec is not None:
            step.mask = spec.custom_mask
            step.mask_indptr = spec.mask_indptr
            if step.mask_indptr is None:
                drafts = spec.draft_token_num
                step.mask_indptr = mask_indptr(
                    drafts,
                    batch.seq_lens + drafts,
                    out=buffers.mask_indptr if buffers else None,
                )

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> LatentBuffers:
        return LatentBuffers(
            slots=SlotBuffers.of(max_bs, self.context),
            mask_indptr=torch.zeros(max_bs + 1, dtype=torch.int32, device=self.context.device),
        )

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the library gives no LSE")

    def attend(
        self, call: AttentionCall, layer: LatentLayer, step: LatentStep, batch: ForwardBatch
    ) -> torch.Tensor:
        q = LatentRows.joined(call.q, call.q_rope)
        out = call.out
        if out is None:
            out = q.new_empty((*q.shape[:2], LatentRows.LATENT_DIM))
        if batch.forward_mode.is_decode():
            self._decode(call, q, out, layer, step)
        else:
            self._extend(call, q, out, layer, step, batch)
        return out if step.hidden is None else out.masked_fill_(step.hidden, 0)

    def _decode(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: LatentLayer,
        step: LatentStep,
    ) -> None:
        if layer.rows is None:
            raise call.layer.not_in_pool()
        cached = LibraryBackend.filled(step.cached)[layer.group]
        splits = _splits(q.shape[0] * -(-q.shape[1] // HEADS))
        # The last value of a row is the part's LSE.
        parts = q.new_empty((*q.shape[:2], splits, LatentRows.LATENT_DIM + 1), dtype=torch.float32)
        self.kernels.decode_attention_fwd_grouped_rope(
            q=q,
            k_buffer=layer.rows,
            v_buffer=layer.rows[..., : LatentRows.LATENT_DIM],
            o=out,
            kv_indptr=cached.indptr,
            kv_indices=cached.indices,
            k_pe_tokens=None,
            kv_lora_rank=LatentRows.LATENT_DIM,
            rotary_dim=0,
            cos_sin_cache=None,
            positions=None,
            attn_logits=parts,
            num_kv_splits=splits,
            sm_scale=call.layer.scaling,
            use_rope=False,
        )

    def _extend(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: LatentLayer,
        step: LatentStep,
        batch: ForwardBatch,
    ) -> None:
        bounds = step.tables.query_bounds(out.device)
        if call.k is not None and call.k_rope is not None:
            new_rows = torch.cat([call.k, call.k_rope], dim=-1)
        elif layer.rows is None:
            raise call.layer.not_in_pool()
        else:
            pool = self.context.token_to_kv_pool
            new_rows = layer.rows[pool.translate(batch.out_cache_loc, call.layer.layer_id)]
        if call.has_own_kv:
            rows, cached = new_rows, SlotLists(indptr=torch.zeros_like(bounds), indices=bounds)
        elif layer.rows is None:
            raise call.layer.not_in_pool()
        else:
            rows, cached = layer.rows, LibraryBackend.filled(step.cached)[layer.group]
        if new_rows.dtype != q.dtype:
            raise InvalidInput("k", got=new_rows.dtype, expected=f"{q.dtype}, as q is")
        self.kernels.extend_attention_fwd(
            q_extend=q,
            k_extend=new_rows,
            v_extend=new_rows[..., : LatentRows.LATENT_DIM],
            o_extend=out,
            k_buffer=rows,
            v_buffer=rows[..., : LatentRows.LATENT_DIM],
            qo_indptr=bounds,
            kv_indptr=cached.indptr,
            kv_indices=cached.indices,
            custom_mask=step.mask,
            is_causal=True,
            mask_indptr=step.mask_indptr,
            max_len_extend=step.tables.max_seqlen_q,
            sm_scale=call.layer.scaling,
            skip_prefix_custom_mask=False,
        )


def _splits(programs: int) -> int:
    """Parts of a request's keys: a power of two, since each number is a kernel of its own."""
    most = max(1, min(MOST_SPLITS, PROGRAMS // max(programs, 1)))
    return 1 << (most.bit_length() - 1)
