"""KV pool of multi-head latent attention: one buffer for each layer, latent and rotary key."""

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


class MLATokenToKVPool(KVPool):
    """[slots, 1, rank + rope] of each layer, zero until written.

    K is the whole row; V is a view of its first `rank` columns.
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
        """Room for `size` tokens, whole pages of them.

        Raises InvalidInput for sizes and dtypes that cannot be, PoolExhausted when memory does
        not suffice.
        """
        super().__init__(
            size=size, page_size=page_size, dtype=dtype, layer_ids=layer_ids, device=device
        )
        check_positive("kv_lora_rank", kv_lora_rank)
        check_positive("qk_rope_head_dim", qk_rope_head_dim)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self._buffers = allocate_zeroed(
            [(self.num_slots, 1, kv_lora_rank + qk_rope_head_dim)] * len(self.layer_ids),
            dtype=dtype,
            device=self.device,
            what=f"MLA KV pool of {size} tokens in {len(self.layer_ids)} layers",
            hint="lower the number of tokens (size) or take a smaller KV dtype",
        )
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
        """Bytes that one token takes in all layers: what an engine divides its budget by.

        The reserved page takes `page_size` tokens more.
        """
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
