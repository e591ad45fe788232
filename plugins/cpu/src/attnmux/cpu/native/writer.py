"""Writes the new tokens' K and V to their slots in one C++ call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.plugin import check_tensor
from attnmux.cpu.native.library import Copied, Written, load_write

if TYPE_CHECKING:
    from attnmux.core import BackendContext, LayerSpec


_Layer = tuple[Written, Copied, Copied, torch.dtype, int, torch.Size, torch.Size]
"""A layer's call and its parts, the dtype, its bytes, and the dims of a token of both buffers."""


class NativeWriter:
    """The `KVWriter` of a pool. Rows that the pool converts are left to the pool's own methods."""

    def __init__(self, context: BackendContext) -> None:
        """Raises BackendFailed if the kernels cannot be compiled."""
        self._pool = context.token_to_kv_pool
        self._write = load_write(context.platform)
        self._layers: dict[int, _Layer] = {}

    def write(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        is_latent: bool,
    ) -> None:
        """Like `KVWriter.write`."""
        kept = self._layers.get(layer.layer_id)
        if kept is None:
            kept = self._layers[layer.layer_id] = self._of(layer)
        call, one, other, dtype, size, first_dims, second_dims = kept
        # Each layer of each step comes here: no call if all is well
        if loc.dtype is not torch.int64 or loc.dim() != 1:
            check_tensor("loc", loc, ("T",), None, torch.int64)
        num_tokens = loc.shape[0]
        if (
            first.shape == (num_tokens, *first_dims)
            and second.shape == (num_tokens, *second_dims)
            and first.dtype is second.dtype is dtype
        ):
            token, head, last = first.stride()
            more_token, more_head, more_last = second.stride()
            if last == more_last == 1:
                slots = self._pool.translate(loc, layer.layer_id)
                call.loc, call.num_tokens = slots.contiguous().data_ptr(), num_tokens
                call.num_threads = torch.get_num_threads()
                one.from_rows, other.from_rows = first.data_ptr(), second.data_ptr()
                one.from_token, one.from_head = token * size, head * size
                other.from_token, other.from_head = more_token * size, more_head * size
                if not self._write(call):
                    return
        if is_latent:
            self._pool.set_mla_kv_buffer(layer, loc, first, second, layer.k_scale)
        else:
            self._pool.set_kv_buffer(layer, loc, first, second, layer.k_scale, layer.v_scale)

    def _of(self, layer: LayerSpec) -> _Layer:
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        if layer.kind == "mla":
            rank = values.shape[-1]
            keys, values = keys[..., :rank], keys[..., rank:]
        call = Written(num_slots=len(keys), first=_part(keys), second=_part(values))
        dims = keys.shape[1:], values.shape[1:]
        return call, call.first, call.second, keys.dtype, keys.itemsize, *dims


def _part(buffer: torch.Tensor) -> Copied:
    size = buffer.itemsize
    return Copied(
        to_rows=buffer.data_ptr(),
        to_slot=buffer.stride(0) * size,
        to_head=buffer.stride(1) * size,
        num_heads=buffer.shape[1],
        head_bytes=buffer.shape[2] * size,
    )
