"""The KV pools of multi-head and of latent attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from attnmux.core.contract.arguments import check_tensor
from attnmux.core.contract.dtypes import ACTIVATION_DTYPES, BLOCK, FP4_DTYPE
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.pool import KVPool
from attnmux.core.contract.quantise import (
    SCALE_DTYPE,
    check_width,
    quantise,
    scale_bytes,
    stored_parts,
)
from attnmux.core.contract.rows import words_of, write_rows
from attnmux.core.facts.errors import InvalidInput


class PairPool(KVPool):
    """K [slots, Hkv, D] and V [slots, Hkv, Dv] of each layer, in memory of any owner."""

    def _hold(self, buffers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Use these buffers, by layer id. Slots and heads may be any distance apart."""
        self._buffers = dict(buffers)
        self._words = {key: (words_of(k), words_of(v)) for key, (k, v) in buffers.items()}

    @property
    def is_strided(self) -> bool:
        return not all(buffer.is_contiguous() for pair in self._buffers.values() for buffer in pair)

    @property
    def nbytes(self) -> int:
        return _nbytes(buffer for pair in self._buffers.values() for buffer in pair)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_kv_buffer(layer_id)[1]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._layer_index(layer_id)
        return self._buffers[layer_id]

    def set_kv_buffer(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        k_buffer, v_buffer = self.get_kv_buffer(layer.layer_id)
        check_tensor("loc", loc, ("T",), None, torch.int64)
        packed = 2 if self.dtype == FP4_DTYPE else 1
        for name, rows, (_, heads, dim) in (("k", k, k_buffer.shape), ("v", v, v_buffer.shape)):
            shape = (len(loc), heads, dim * packed)
            check_tensor(name, rows, shape, loc.device, *ACTIVATION_DTYPES)
        k, *k_scales = stored_parts(k, self.dtype, k_scale)
        v, *v_scales = stored_parts(v, self.dtype, v_scale)
        k_words, v_words = self._words[layer.layer_id]
        write_rows(k_words, loc, k)
        write_rows(v_words, loc, v)
        for buffer, scale in zip(self.memory(layer.layer_id)[2:], k_scales + v_scales, strict=True):
            buffer.view(torch.uint8).index_copy_(0, loc, scale.view(torch.uint8))


class LatentPool(KVPool):
    """Latents and rotary keys [slots, 1, rank + rope] of each layer, in memory of any owner.

    K is the whole row; V is a view of its first `rank` columns.
    """

    def _hold(
        self, rows: Mapping[int, torch.Tensor], kv_lora_rank: int, qk_rope_head_dim: int
    ) -> None:
        """Use these buffers, by layer id: none, or any. Slots may be any distance apart."""
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self._buffers = dict(rows)
        self._words = {
            key: (words_of(row[..., :kv_lora_rank]), words_of(row[..., kv_lora_rank:]))
            for key, row in rows.items()
        }

    @property
    def is_strided(self) -> bool:
        return not all(buffer.is_contiguous() for buffer in self._buffers.values())

    @property
    def nbytes(self) -> int:
        return _nbytes(self._buffers.values())

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._layer_index(layer_id)
        return self._buffers[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def read_scales(self, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
        scale, _ = super().read_scales(k_scale, None)
        return scale, scale

    def set_mla_kv_buffer(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        k_scale: float | None = None,
    ) -> None:
        self._layer_index(layer.layer_id)
        check_tensor("loc", loc, ("T",), None, torch.int64)
        dims = (("k_nope", k_nope, self.kv_lora_rank), ("k_rope", k_rope, self.qk_rope_head_dim))
        for name, rows, dim in dims:
            check_tensor(name, rows, (len(loc), 1, dim), loc.device, *ACTIVATION_DTYPES)
        nope = quantise(k_nope, self.dtype, k_scale)
        rope = quantise(k_rope, self.dtype, k_scale)
        nope_words, rope_words = self._words[layer.layer_id]
        write_rows(nope_words, loc, nope)
        write_rows(rope_words, loc, rope)


def _nbytes(buffers: Iterable[torch.Tensor]) -> int:
    """Bytes of the slots; a cache that several layers share counts once."""
    views = {
        (buffer.data_ptr(), buffer.shape): buffer.numel() * buffer.itemsize for buffer in buffers
    }
    return sum(views.values())


class MHATokenToKVPool(PairPool):
    """The memory of multi-head and grouped-query attention, zero until written."""

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
            InvalidInput.check_at_least(1, name, getattr(self, name))
        layers, dims = len(self.layer_ids), (head_dim, self.v_head_dim)
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        if dtype == FP4_DTYPE:
            check_width("head_dim", head_dim)
            check_width("v_head_dim", self.v_head_dim)
            scales = [self._allocate_scales(dim) for dim in dims]
            self._scales = list(zip(*scales, strict=True))
            dims = head_dim // 2, self.v_head_dim // 2
        shapes = [(self.num_slots, num_kv_heads, dim) for dim in dims for _ in range(layers)]
        buffers = self._allocate(shapes, dtype, "KV pool")
        pairs = zip(buffers[:layers], buffers[layers:], strict=True)
        self._hold(dict(zip(self.layer_ids, pairs, strict=True)))

    @staticmethod
    def bytes_per_token(
        *,
        dtype: torch.dtype,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
    ) -> int:
        """Bytes of one token in all layers."""
        dims = head_dim, head_dim if v_head_dim is None else v_head_dim
        if dtype == FP4_DTYPE:
            return num_layers * num_kv_heads * sum(dim // 2 + scale_bytes(dim) for dim in dims)
        return num_layers * num_kv_heads * sum(dims) * dtype.itemsize

    def _allocate_scales(self, dim: int) -> list[torch.Tensor]:
        """[slots, Hkv, dim / BLOCK] of each layer, zero.

        In memory a head's slots are side by side. One head's scales of a slot are less than a
        sector of memory, so in another order a kernel that reads one head would fetch other heads
        too.
        """
        shape = self.num_kv_heads, self.num_slots, scale_bytes(dim)
        shapes = [shape] * len(self.layer_ids)
        buffers = self._allocate(shapes, SCALE_DTYPE, "scales of the KV pool")
        return [scales.transpose(0, 1)[..., : dim // BLOCK] for scales in buffers]

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.bytes_per_token(
            dtype=self.dtype,
            num_layers=len(self.layer_ids),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )

    def get_scale_buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        index = self._layer_index(layer_id)
        return self._scales[index] if self._scales else None


class MLATokenToKVPool(LatentPool):
    """The memory of multi-head latent attention, zero until written."""

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
        self.check_whole_bytes("MLA's latents")
        InvalidInput.check_at_least(1, "kv_lora_rank", kv_lora_rank)
        InvalidInput.check_at_least(1, "qk_rope_head_dim", qk_rope_head_dim)
        shape = (self.num_slots, 1, kv_lora_rank + qk_rope_head_dim)
        buffers = self._allocate([shape] * len(self.layer_ids), dtype, "MLA KV pool")
        rows = dict(zip(self.layer_ids, buffers, strict=True))
        self._hold(rows, kv_lora_rank, qk_rope_head_dim)

    @staticmethod
    def bytes_per_token(
        *, dtype: torch.dtype, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int
    ) -> int:
        """Bytes of one token in all layers."""
        return num_layers * (kv_lora_rank + qk_rope_head_dim) * dtype.itemsize
