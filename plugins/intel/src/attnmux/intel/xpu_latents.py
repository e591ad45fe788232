"""sgl-kernel-xpu's kernels over latents of 512 and rotary parts of 64: MLA, absorbed.

Decode is `flash_mla_decode`, which splits keys; other steps are `flash_mla_prefill`, which does
not. Neither returns LSE. Rows of the page table have room for a multiple of 128 keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import KeyGroup, LatentRows, LibraryBackend, Rows
from attnmux.intel.packed_steps import PackedBackend, PackedStep
from attnmux.intel.xpu_library import XPUKernels

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, ForwardBatch, LayerSpec
    from attnmux.core.plugin import Keys
    from attnmux.intel.packed_requests import PackedRequests

PAGE_SIZES = (128, 64, 32, 16)
MOST_HEADS = 128
KEY_TILE = 128
"""Keys that a row of the table has room for a multiple of."""
TILE = 256
"""Rows of the largest tile of prefill. Its store has no bound after the last query; and its kernel
does not handle a request that ends within a tile."""
AUTOMATIC = -1
"""Value of `num_kv_splits`: as many parts as the kernel finds best."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentLayer:
    """A layer as the kernels take it."""

    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    cache: torch.Tensor | None = None
    """[pages, page, 576], the pool's memory."""


class XPULatentBackend(PackedBackend[XPUKernels]):
    """MLA, prefill and decode."""

    def prepare_layer(self, layer: LayerSpec) -> LatentLayer:
        LatentRows.check(layer)
        if layer.tp_q_head_num > MOST_HEADS:
            got, expected = f"{layer.tp_q_head_num} heads", f"at most {MOST_HEADS}"
            raise InvalidInput(f"layer {layer.layer_id}", got=got, expected=expected)
        self.context.check_page_size(*PAGE_SIZES)
        self.context.check_sixteen_bits()
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return LatentLayer()
        cache = self.context.latent_pages(layer, pool.page_size).squeeze(2)
        if not cache.is_contiguous():
            got = f"latents with strides {cache.stride()}"
            raise InvalidInput("token_to_kv_pool", got=got, expected="latents without gaps")
        return LatentLayer(group=KeyGroup.of(layer, self.context), cache=cache)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> PackedStep:
        if batch.forward_mode.is_target_verify():
            raise InvalidInput("forward_mode", got="TARGET_VERIFY", expected="EXTEND or DECODE")
        return self.plan_packed(batch, key_tile=KEY_TILE)

    def attend(
        self, call: AttentionCall, layer: LatentLayer, step: PackedStep, batch: ForwardBatch
    ) -> torch.Tensor:
        requests = self.requests_of(call, step)
        if not requests.num_queries:
            return call.empty_result()
        keys, cache = self._keys(call, layer, step, requests)
        if batch.forward_mode.is_decode():
            return self._decode(call, cache, keys, step)
        bounds = requests.bounds(step.tables.query_bounds(cache.device))
        return self._prefill(call, cache, keys, bounds, requests)

    def _keys(
        self, call: AttentionCall, layer: LatentLayer, step: PackedStep, requests: PackedRequests
    ) -> tuple[Keys, torch.Tensor]:
        if call.has_own_kv:
            rows = torch.cat(call.own_keys(call.k_rope), dim=-1).squeeze(1)
            page_size = self.context.token_to_kv_pool.page_size
            keys, (pages,) = requests.own_pages(page_size, KEY_TILE, rows)
            return keys, pages
        if layer.group is None or layer.cache is None:
            raise call.layer.not_in_pool()
        return requests.keys(LibraryBackend.filled(step.keys)[layer.group]), layer.cache

    def _decode(
        self, call: AttentionCall, cache: torch.Tensor, keys: Keys, step: PackedStep
    ) -> torch.Tensor:
        (batch_size, heads, _), page_size = call.q.shape, cache.shape[1]
        out = call.out
        if out is None or not Rows.is_writable(out):
            out = call.q.new_empty((batch_size, heads, LatentRows.LATENT_DIM))
        size = self.kernels.flash_mla_get_workspace_size(
            keys.page_table.shape[1] * page_size, batch_size, heads, page_size, AUTOMATIC
        )
        self.kernels.flash_mla_decode(
            out=out,
            q_nope=Rows.aligned(call.q.contiguous()),
            q_pe=Rows.aligned(call.rotary_queries().contiguous()),
            kv_c_and_k_pe_cache=cache,
            seq_lens=keys.lens.contiguous(),
            page_table=keys.page_table.contiguous(),
            workspace=torch.empty(size, dtype=torch.uint8, device=cache.device),
            sm_scale=call.layer.scaling,
            num_kv_splits=AUTOMATIC,
        )
        step.replace_empty(out)
        return out

    def _prefill(
        self,
        call: AttentionCall,
        cache: torch.Tensor,
        keys: Keys,
        bounds: torch.Tensor,
        requests: PackedRequests,
    ) -> torch.Tensor:
        (rows, heads, _), count = call.q.shape, requests.num_queries
        out = call.q.new_empty((-(-count // TILE) * TILE, heads, LatentRows.LATENT_DIM))
        longest = requests.longest
        if longest % TILE == 0:
            # It keeps the kernel off its largest tile, which other requests may end within.
            longest += 1
        self.kernels.flash_mla_prefill(
            out=out,
            q_nope=Rows.aligned(call.q[:count].contiguous()),
            q_pe=Rows.aligned(call.rotary_queries()[:count].contiguous()),
            kv_c_and_k_pe_cache=cache,
            cu_seqlens_q=bounds,
            seq_lens=keys.lens.contiguous(),
            max_seqlen_q=longest,
            page_table=keys.page_table.contiguous(),
            workspace=torch.empty(0, dtype=torch.uint8, device=cache.device),
            sm_scale=call.layer.scaling,
            causal=True,
            num_kv_splits=AUTOMATIC,
        )
        if rows > len(out):
            out = torch.cat([out, out.new_empty((rows - len(out), heads, LatentRows.LATENT_DIM))])
        out[count:rows] = 0
        return out[:rows]
