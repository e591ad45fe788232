"""KV pools and a request table over an engine's: memory that attnmux uses but did not allocate."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnmux.core.arguments import check_positive, described
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.pool import HasLayerId, KVPool, check_loc, check_rows, word_dtype
from attnmux.core.kv.quantise import quantise
from attnmux.core.kv.request_table import RequestTable


class ForeignKVPool(KVPool):
    """K [slots, Hkv, D] and V [slots, Hkv, Dv] of each layer, as views of the engine's cache.

    Slots and heads may be any distance apart, as where K and V of a head lie side by side; the
    values of a head are contiguous. Page 0 is reserved, as in every pool: the engine hands it to no
    request. Layers that share a cache have the same views.
    """

    def __init__(
        self, buffers: Mapping[int, tuple[torch.Tensor, torch.Tensor]], *, page_size: int
    ) -> None:
        """buffers: K and V by layer id, of one dtype and device and with the same slots, in whole
        pages. 8-bit floats that an engine keeps as bytes come as a view of their own dtype.

        Raises InvalidInput for buffers that do not fit this.
        """
        if not buffers:
            raise InvalidInput("buffers", got="none", expected="K and V of at least one layer")
        check_positive("page_size", page_size)
        first = next(iter(buffers.values()))[0]
        super().__init__(
            size=first.shape[0] - page_size,
            page_size=page_size,
            dtype=first.dtype,
            layer_ids=tuple(buffers),
            device=first.device,
        )
        self._check_whole_bytes()
        for layer_id, pair in buffers.items():
            for buffer in pair:
                _check_buffer(layer_id, buffer, first)
        self._buffers = dict(buffers)
        self._words = {
            layer_id: (_strided_words(k), _strided_words(v)) for layer_id, (k, v) in buffers.items()
        }

    @property
    def is_strided(self) -> bool:
        pairs = self._buffers.values()
        return not all(buffer.is_contiguous() for pair in pairs for buffer in pair)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots; a cache that several layers share counts once."""
        views = {
            (buffer.data_ptr(), buffer.shape): buffer.numel() * buffer.itemsize
            for pair in self._buffers.values()
            for buffer in pair
        }
        return sum(views.values())

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_kv_buffer(layer_id)[1]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._layer_index(layer_id)
        return self._buffers[layer_id]

    def set_kv_buffer(
        self,
        layer: HasLayerId,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        buffers = self.get_kv_buffer(layer.layer_id)
        num_tokens = check_loc(loc)
        for name, rows, buffer in zip(("k", "v"), (k, v), buffers, strict=True):
            check_rows(name, rows, (num_tokens, *buffer.shape[1:]), loc)
        k_words, v_words = self._words[layer.layer_id]
        k, v = quantise(k, self.dtype, k_scale), quantise(v, self.dtype, v_scale)
        _write(k_words, loc, k)
        _write(v_words, loc, v)


class ForeignMLAPool(KVPool):
    """Latents [slots, 1, rank + rope] of each layer, as views of the engine's cache."""

    def __init__(
        self, buffers: Mapping[int, torch.Tensor], *, page_size: int, kv_lora_rank: int
    ) -> None:
        """buffers: rows of the latent and the rotary key by layer id; else as `ForeignKVPool`.

        Raises InvalidInput for buffers that do not fit this.
        """
        pairs = {layer_id: (rows, rows[..., :kv_lora_rank]) for layer_id, rows in buffers.items()}
        self._rows = ForeignKVPool(pairs, page_size=page_size)
        first = next(iter(buffers.values()))
        if first.shape[1] != 1 or not 0 < kv_lora_rank < first.shape[2]:
            raise InvalidInput(
                "buffers", got=described(first), expected=f"[slots, 1, {kv_lora_rank} + rope]"
            )
        super().__init__(
            size=self._rows.size,
            page_size=page_size,
            dtype=first.dtype,
            layer_ids=tuple(buffers),
            device=first.device,
        )
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = first.shape[2] - kv_lora_rank
        self._words = {
            layer_id: (
                _strided_words(rows[..., :kv_lora_rank]),
                _strided_words(rows[..., kv_lora_rank:]),
            )
            for layer_id, rows in buffers.items()
        }

    @property
    def is_strided(self) -> bool:
        return not all(map(torch.Tensor.is_contiguous, map(self.get_key_buffer, self.layer_ids)))

    @property
    def nbytes(self) -> int:
        rows = {key.data_ptr(): key for key in map(self.get_key_buffer, self.layer_ids)}
        return sum(key.numel() * key.itemsize for key in rows.values())

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._rows.get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._rows.get_value_buffer(layer_id)

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
        self._layer_index(layer.layer_id)
        num_tokens = check_loc(loc)
        check_rows("k_nope", k_nope, (num_tokens, 1, self.kv_lora_rank), loc)
        check_rows("k_rope", k_rope, (num_tokens, 1, self.qk_rope_head_dim), loc)
        nope_words, rope_words = self._words[layer.layer_id]
        _write(nope_words, loc, quantise(k_nope, self.dtype, k_scale))
        _write(rope_words, loc, quantise(k_rope, self.dtype, k_scale))


class ForeignRequestTable(RequestTable):
    """An engine's own table of slots, used in place. The engine hands out its rows."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        """req_to_token: [rows, max_context_len] int32; row 0 belongs to padding.

        Raises InvalidInput for another dtype or shape.
        """
        if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or len(req_to_token) < 2:
            expected = "torch.int32 of shape (rows of requests + 1, max_context_len)"
            raise InvalidInput("req_to_token", got=described(req_to_token), expected=expected)
        super().__init__(req_to_token.shape[0] - 1, req_to_token.shape[1], req_to_token.device)
        self._req_to_token = req_to_token

    @property
    def req_to_token(self) -> torch.Tensor:
        return self._req_to_token

    def columns_for(self, page_size: int) -> tuple[torch.Tensor, int]:
        return self._req_to_token, 1


def _check_buffer(layer_id: int, buffer: torch.Tensor, first: torch.Tensor) -> None:
    """Raise InvalidInput unless the buffer has the slots, dtype and device of the first."""
    expected = f"{first.dtype} of shape ({first.shape[0]}, heads, dim) on {first.device}"
    if (
        buffer.dim() != 3
        or buffer.shape[0] != first.shape[0]
        or buffer.dtype != first.dtype
        or buffer.device != first.device
    ):
        got = f"{described(buffer)} on {buffer.device}"
        raise InvalidInput(f"buffers, layer {layer_id}", got=got, expected=expected)
    if buffer.stride(-1) != 1:
        raise InvalidInput(
            f"buffers, layer {layer_id}",
            got=f"strides {buffer.stride()}",
            expected="the values of a head next to each other",
        )


def _strided_words(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer [slots, Hkv, D] as the widest integers that its rows and strides divide into; see
    `word_dtype`. The dims of one slot are joined where they are contiguous."""
    slots, heads, dim = buffer.shape
    if heads == 1 or buffer.stride(1) == dim:
        buffer = buffer.as_strided((slots, heads * dim), (buffer.stride(0), 1))
    lengths = (buffer.shape[-1], int(buffer.storage_offset()), *buffer.stride()[:-1])
    return buffer.view(word_dtype(*(length * buffer.itemsize for length in lengths)))


def _write(words: torch.Tensor, loc: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows [T, Hkv, D], already of the stored dtype, to words[loc]."""
    rows = (rows.flatten(1) if words.dim() == 2 else rows).contiguous()
    if rows.storage_offset() * rows.itemsize % words.itemsize:
        rows = rows.clone()  # the slice begins in the middle of a word
    words.index_copy_(0, loc, rows.view(words.dtype))
