"""SGLang's KV pools and request table, used in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool as SglangSWAKVPool

from attnmux.core import (
    InvalidInput,
    KVPool,
    LayerSpec,
    SWAKVPool,
    foreign_pool,
)
from attnmux.sglang.request_table import ForeignRequestTable


def kv_pool(theirs: Any, layers: Sequence[LayerSpec]) -> KVPool:  # noqa: ANN401  # any pool of SGLang
    """SGLang's pool of these layers; nothing is copied.

    Raises InvalidInput for a pool whose rows are not K and V as numbers.
    """
    if isinstance(theirs, SglangSWAKVPool):
        in_window = [layer for layer in layers if theirs.layers_mapping[layer.layer_id][1]]
        in_full = [layer for layer in layers if not theirs.layers_mapping[layer.layer_id][1]]
        if in_window and in_full:
            _check_class(theirs.full_kv_pool)
            _check_class(theirs.swa_kv_pool)
            return SglangWindowPool(
                theirs,
                full=_buffers(theirs, in_full, theirs.page_size),
                swa=_buffers(theirs, in_window, theirs.page_size),
            )
        expected = "window layers and others: --disable-hybrid-swa-memory makes one pool"
        raise InvalidInput("token_to_kv_pool", got="layers of one kind", expected=expected)
    _check_class(theirs)
    return _buffers(theirs, layers, theirs.page_size)


def _check_class(theirs: Any) -> None:  # noqa: ANN401  # any pool of SGLang
    """Subclasses of the plain pools store scales or other layouts."""
    if type(theirs) not in (MHATokenToKVPool, MLATokenToKVPool):
        expected = "MHATokenToKVPool or MLATokenToKVPool: leave --kv-cache-dtype at auto or fp8"
        raise InvalidInput("token_to_kv_pool", got=type(theirs).__name__, expected=expected)


def _buffers(theirs: Any, layers: Sequence[LayerSpec], page_size: int) -> KVPool:  # noqa: ANN401
    if layers[0].kind == "mla":
        rows = {each.layer_id: theirs.get_key_buffer(each.layer_id) for each in layers}
        return foreign_pool(rows, page_size=page_size, kv_lora_rank=layers[0].v_head_dim)
    pairs = {
        layer.layer_id: (
            theirs.get_key_buffer(layer.layer_id),
            theirs.get_value_buffer(layer.layer_id),
        )
        for layer in layers
    }
    return foreign_pool(pairs, page_size=page_size)


class SglangWindowPool(SWAKVPool):
    """SGLang's pool with window layers, whose allocator keeps the table that translates slots."""

    def __init__(self, theirs: SglangSWAKVPool, *, full: KVPool, swa: KVPool) -> None:
        super().__init__(full=full, swa=swa)
        self._theirs = theirs

    def translate(self, slots: torch.Tensor, layer_id: int) -> torch.Tensor:
        if self._pool_of(layer_id) is self.full:
            return slots
        return self._gather(slots)

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        is_full = self._pool_of(layer_id) is self.full
        return None if is_full else self._theirs.full_to_swa_index_mapping

    def translate_pages(self, pages: torch.Tensor, layer_id: int) -> torch.Tensor:
        if self._pool_of(layer_id) is self.full:
            return pages
        return self._gather(pages * self.page_size).floor_divide_(self.page_size)

    def _gather(self, slots: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self._theirs.full_to_swa_index_mapping
        found = table.index_select(0, slots.reshape(-1)).clamp_(min=0)
        return found.view(slots.shape).to(slots.dtype)


def request_table(theirs: Any) -> ForeignRequestTable:  # noqa: ANN401  # SGLang's ReqToTokenPool
    """SGLang's request table. Its row 0 is padding's, as ours is."""
    table: torch.Tensor = theirs.req_to_token
    return ForeignRequestTable(table)
