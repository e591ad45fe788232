"""The KV pools of multi-head and of latent attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.kv.four_bits import BLOCK, SCALE_DTYPE, check_width, scale_bytes
from attnmux.core.kv.four_bits import DTYPE as FP4_DTYPE
from attnmux.core.kv.pool import HasLayerId, KVPool, check_loc, check_rows, word_dtype, write_rows
from attnmux.core.kv.quantise import quantise, stored_parts


class MHATokenToKVPool(KVPool):
    """Multi-head and grouped-query attention: K [slots, Hkv, D] and V [slots, Hkv, Dv] of each
    layer, zero until written."""

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
        """Room for `size` tokens, in whole pages; `num_kv_heads` counts this rank's heads.

        `v_head_dim` defaults to `head_dim`.
        Raises InvalidInput for impossible sizes and dtypes and for heads that 4-bit floats cannot
        hold, PoolExhausted when memory is short.
        """
        super().__init__(
            size=size, page_size=page_size, dtype=dtype, layer_ids=layer_ids, device=device
        )
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        for name in ("num_kv_heads", "head_dim", "v_head_dim"):
            check_positive(name, getattr(self, name))
        layers, dims = len(self.layer_ids), (head_dim, self.v_head_dim)
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        if dtype == FP4_DTYPE:
            check_width("head_dim", head_dim)
            check_width("v_head_dim", self.v_head_dim)
            scales = [self._allocate_scales(dim) for dim in dims]
            self._scales = list(zip(*scales, strict=True))
            dims = head_dim // 2, self.v_head_dim // 2
        shapes = [(num_kv_heads, dim) for dim in dims for _ in range(layers)]
        buffers = self._allocate(shapes, "KV pool")
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
        """Bytes of one token in all layers, for `tokens_in_budget`."""
        dims = head_dim, head_dim if v_head_dim is None else v_head_dim
        if dtype == FP4_DTYPE:
            return num_layers * num_kv_heads * sum(dim // 2 + scale_bytes(dim) for dim in dims)
        return num_layers * num_kv_heads * sum(dims) * dtype.itemsize

    def _allocate_scales(self, dim: int) -> list[torch.Tensor]:
        """[slots, Hkv, dim / BLOCK] of each layer, zero.

        In memory a head's slots are side by side: a kernel that reads one head would fetch those of
        other heads with it, since its scales of one slot are less than a sector of memory.
        """
        shape = self.num_kv_heads, self.num_slots, scale_bytes(dim)
        shapes = [shape] * len(self.layer_ids)
        made = self._allocate_shapes(shapes, SCALE_DTYPE, "scales of the KV pool")
        return [each.transpose(0, 1)[..., : dim // BLOCK] for each in made]

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.bytes_per_token(
            dtype=self.dtype,
            num_layers=len(self.layer_ids),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._k[self._layer_index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._v[self._layer_index(layer_id)]

    def get_scale_buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        index = self._layer_index(layer_id)
        return self._scales[index] if self._scales else None

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
        k, *k_scales = stored_parts(k, self.dtype, k_scale)
        v, *v_scales = stored_parts(v, self.dtype, v_scale)
        write_rows(self._k_words[index], loc, k)
        write_rows(self._v_words[index], loc, v)
        for buffer, rows in zip(self.memory(layer.layer_id)[2:], k_scales + v_scales, strict=True):
            buffer.view(torch.uint8).index_copy_(0, loc, rows.view(torch.uint8))


class MLATokenToKVPool(KVPool):
    """Multi-head latent attention: [slots, 1, rank + rope] of each layer, zero until written.

    K is the whole row, latent and rotary key; V is a view of its first `rank` columns.
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_ids: Sequence[int],
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        device: torch.device | str,
    ) -> None:
        """Room for `size` tokens, in whole pages.

        Raises InvalidInput for impossible sizes and dtypes, PoolExhausted when memory is short.
        """
        super().__init__(
            size=size, page_size=page_size, dtype=dtype, layer_ids=layer_ids, device=device
        )
        self._check_whole_bytes()
        check_positive("kv_lora_rank", kv_lora_rank)
        check_positive("qk_rope_head_dim", qk_rope_head_dim)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        row = (1, kv_lora_rank + qk_rope_head_dim)
        self._buffers = self._allocate([row] * len(self.layer_ids), "MLA KV pool")
        rank_bytes = kv_lora_rank * dtype.itemsize
        word = word_dtype(rank_bytes, qk_rope_head_dim * dtype.itemsize)
        split = rank_bytes // word.itemsize
        words = [buffer.squeeze(1).view(word) for buffer in self._buffers]
        self._nope_words = [rows[:, :split] for rows in words]
        self._rope_words = [rows[:, split:] for rows in words]

    @staticmethod
    def bytes_per_token(
        *, dtype: torch.dtype, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int
    ) -> int:
        """Bytes of one token in all layers, for `tokens_in_budget`."""
        return num_layers * (kv_lora_rank + qk_rope_head_dim) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._buffers[self._layer_index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def read_scales(self, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
        scale, _ = super().read_scales(k_scale, None)
        return scale, scale

    def set_mla_kv_buffer(
        self,
        layer: HasLayerId,
        loc: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        k_scale: float | None = None,
    ) -> None:
        index = self._layer_index(layer.layer_id)
        num_tokens = check_loc(loc)
        check_rows("k_nope", k_nope, (num_tokens, 1, self.kv_lora_rank), loc)
        check_rows("k_rope", k_rope, (num_tokens, 1, self.qk_rope_head_dim), loc)
        nope = quantise(k_nope, self.dtype, k_scale)
        rope = quantise(k_rope, self.dtype, k_scale)
        write_rows(self._nope_words[index], loc, nope)
        write_rows(self._rope_words[index], loc, rope)


def _word_view(buffer: torch.Tensor) -> torch.Tensor:
    rows = buffer.view(buffer.shape[0], -1)
    return rows.view(word_dtype(rows.shape[1] * rows.element_size()))
