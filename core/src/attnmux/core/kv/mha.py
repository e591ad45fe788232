"""KV pool of multi-head and grouped-query attention: a K and a V buffer for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.kv.memory import allocate_zeroed
from attnmux.core.kv.pool import (
    HasLayerId,
    KVPool,
    check_loc,
    check_rows,
    word_dtype,
    write_rows,
)
from attnmux.core.kv.quantise import quantise
from attnmux.core.sizes import check_positive


class MHATokenToKVPool(KVPool):
    """K [slots, Hkv, D] and V [slots, Hkv, Dv] of each layer, zero until written."""

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_ids: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        device: torch.device | str,
    ) -> None:
        """Room for `size` tokens, whole pages of them; heads are this rank's.

        `v_head_dim` is `head_dim` unless given.
        Raises InvalidInput for sizes and dtypes that cannot be, PoolExhausted when memory does
        not suffice.
        """
        super().__init__(
            size=size, page_size=page_size, dtype=dtype, layer_ids=layer_ids, device=device
        )
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_positive("num_kv_heads", num_kv_heads)
        check_positive("head_dim", head_dim)
        check_positive("v_head_dim", v_head_dim)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        layers = len(self.layer_ids)
        k_shape = (self.num_slots, num_kv_heads, head_dim)
        v_shape = (self.num_slots, num_kv_heads, v_head_dim)
        buffers = allocate_zeroed(
            [k_shape] * layers + [v_shape] * layers,
            dtype=dtype,
            device=self.device,
            what=f"KV pool of {size} tokens in {layers} layers",
            hint="lower the number of tokens (size) or take a smaller KV dtype",
        )
        self._k, self._v = buffers[:layers], buffers[layers:]
        self._k_words = [_word_view(buffer) for buffer in self._k]
        self._v_words = [_word_view(buffer) for buffer in self._v]

    @staticmethod
    def bytes_per_token(
        *,
        dtype: torch.dtype,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
    ) -> int:
        """Bytes that one token takes in all layers: what an engine divides its budget by.

        The reserved page takes `page_size` tokens more.
        """
        dims = head_dim + (head_dim if v_head_dim is None else v_head_dim)
        return num_layers * num_kv_heads * dims * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._k, *self._v))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._k[self._layer_index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._v[self._layer_index(layer_id)]

    def set_kv_buffer(
        self,
        layer: HasLayerId,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        index = self._layer_index(layer.layer_id)
        num_tokens = check_loc(loc)
        check_rows("k", k, (num_tokens, self.num_kv_heads, self.head_dim), loc)
        check_rows("v", v, (num_tokens, self.num_kv_heads, self.v_head_dim), loc)
        k, v = quantise(k, self.dtype, k_scale), quantise(v, self.dtype, v_scale)
        write_rows(self._k_words[index], loc, k)
        write_rows(self._v_words[index], loc, v)


def _word_view(buffer: torch.Tensor) -> torch.Tensor:
    rows = buffer.view(buffer.shape[0], -1)
    return rows.view(word_dtype(rows.shape[1] * rows.element_size()))
