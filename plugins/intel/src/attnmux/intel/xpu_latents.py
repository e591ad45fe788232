"""sgl-kernel-xpu's kernels over latents of 512 and rotary parts of 64: MLA, absorbed.

Decode is `flash_mla_decode`, which splits keys; other steps are `flash_mla_prefill`, which does
not. Neither returns LSE. Rows of the page table have room for a multiple of 128 keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    LATENT_DIM,
    DecodeStep,
    GraphUnsupported,
    InvalidInput,
    KeyGroup,
    LibraryBackend,
    aligned,
    check_latent,
    check_page_size,
    check_plain,
    check_sixteen_bits,
    filled,
    is_writable,
    latent_pages,
    not_in_pool,
    rotary,
)
from attnmux.intel.packed_requests import PackedRequests
from attnmux.intel.xpu_library import XPUKernels

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, Keys, LayerSpec

PAGE_SIZES = (128, 64, 32, 16)
MOST_HEADS = 128
KEY_TILE = 128
"""Keys that a row of the table has room for a multiple of."""
TILE = 256
"""Rows of the largest tile of prefill. Its store has no bound after the last query; and its kernel
does not handle a request that ends within a tile."""
AUTOMATIC = -1
"""Of `num_kv_splits`: as many parts as the kernel finds best."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentLayer:
    """A layer as the kernels take it."""

    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    cache: torch.Tensor | None = None
    """[pages, page, 576], the pool's memory."""


@dataclass(kw_only=True, slots=True, eq=False)
class LatentStep(DecodeStep):
    """A step of any phase."""

    requests: PackedRequests | None = None
    """Set by `plan_step`."""


class XPULatentBackend(LibraryBackend[XPUKernels, LatentLayer, LatentStep, None]):
    """MLA, prefill and decode."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: XPUKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options, kernels)
        groups = (layer.group for layer in self._layers.values() if layer.group is not None)
        self._groups = tuple(dict.fromkeys(groups))

    def prepare_layer(self, layer: LayerSpec) -> LatentLayer:
        check_latent(layer)
        check_plain(layer)
        if layer.tp_q_head_num > MOST_HEADS:
            got, expected = f"{layer.tp_q_head_num} heads", f"at most {MOST_HEADS}"
            raise InvalidInput(f"layer {layer.layer_id}", got=got, expected=expected)
        check_page_size(self.context, *PAGE_SIZES)
        check_sixteen_bits(self.context)
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return LatentLayer()
        cache = latent_pages(layer, self.context, pool.page_size).squeeze(2)
        if not cache.is_contiguous():
            got = f"latents with strides {cache.stride()}"
            raise InvalidInput("token_to_kv_pool", got=got, expected="latents without gaps")
        return LatentLayer(group=KeyGroup.of(layer, self.context), cache=cache)

    def plan_step(self, batch: ForwardBatch, buffers: None) -> LatentStep:
        if batch.forward_mode.is_target_verify():
            raise InvalidInput("forward_mode", got="TARGET_VERIFY", expected="EXTEND or DECODE")
        step = LatentStep.of(batch, self.context, None, key_tile=KEY_TILE)
        step.requests = PackedRequests.of(batch, step.tables.queries_each)
        return step

    def fill_step(self, step: LatentStep, batch: ForwardBatch) -> None:
        step.fill(batch, self._groups, self.context)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported("graphs of Intel's GPUs are not captured")

    def attend(
        self, call: AttentionCall, layer: LatentLayer, step: LatentStep, batch: ForwardBatch
    ) -> torch.Tensor:
        requests, pool = filled(step.requests), self.context.token_to_kv_pool
        if call.lse is not None:
            raise InvalidInput("lse", got="a tensor", expected="None: the kernels write none")
        if call.q.dtype != pool.dtype:
            raise InvalidInput("q", got=call.q.dtype, expected=f"{pool.dtype}, as the pool is")
        if not requests.num_queries:
            return call.empty_result()
        keys, cache = self._keys(call, layer, step, requests)
        if batch.forward_mode.is_decode():
            return self._decode(call, cache, keys, step)
        bounds = requests.bounds(step.tables.query_bounds(cache.device))
        return self._prefill(call, cache, keys, bounds, requests)

    def _keys(
        self, call: AttentionCall, layer: LatentLayer, step: LatentStep, requests: PackedRequests
    ) -> tuple[Keys, torch.Tensor]:
        if call.has_own_kv:
            if call.k is None or call.k_rope is None:
                raise not_in_pool(call.layer)
            if call.k.dtype != call.q.dtype or call.k_rope.dtype != call.q.dtype:
                got = f"{call.k.dtype} and {call.k_rope.dtype}"
                raise InvalidInput("k", got=got, expected=f"{call.q.dtype}, as q is")
            rows = torch.cat([call.k, call.k_rope], dim=-1).squeeze(1)
            page_size = self.context.token_to_kv_pool.page_size
            keys, (pages,) = requests.own_pages(page_size, KEY_TILE, rows)
            return keys, pages
        if layer.group is None or layer.cache is None:
            raise not_in_pool(call.layer)
        return requests.keys(filled(step.keys)[layer.group]), layer.cache

    def _decode(
        self, call: AttentionCall, cache: torch.Tensor, keys: Keys, step: LatentStep
    ) -> torch.Tensor:
        (batch_size, heads, _), page_size = call.q.shape, cache.shape[1]
        out = call.out
        if out is None or not is_writable(out):
            out = call.q.new_empty((batch_size, heads, LATENT_DIM))
        size = self.kernels.flash_mla_get_workspace_size(
            keys.page_table.shape[1] * page_size, batch_size, heads, page_size, AUTOMATIC
        )
        self.kernels.flash_mla_decode(
            out=out,
            q_nope=aligned(call.q.contiguous()),
            q_pe=aligned(rotary(call.q_rope).contiguous()),
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
        out = call.q.new_empty((-(-count // TILE) * TILE, heads, LATENT_DIM))
        longest = requests.longest
        if longest % TILE == 0:
            # It keeps the kernel off its largest tile, which other requests may end within.
            longest += 1
        self.kernels.flash_mla_prefill(
            out=out,
            q_nope=aligned(call.q[:count].contiguous()),
            q_pe=aligned(rotary(call.q_rope)[:count].contiguous()),
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
            out = torch.cat([out, out.new_empty((rows - len(out), heads, LATENT_DIM))])
        out[count:rows] = 0
        return out[:rows]
