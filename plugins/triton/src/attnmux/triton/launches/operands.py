"""The tensors that an attention kernel reads and writes, and how their rows are apart."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.core import AttentionCall, KVPool, LayerSpec

OPERANDS = "q", "q_tail", "out", "lse"
"""The tensors of every call, by the kernels' names."""
STRIDES = (
    "q_stride",
    "q_head_stride",
    "q_tail_stride",
    "q_tail_head_stride",
    "out_stride",
    "lse_stride",
    "slots_stride",
)
KEY_STRIDES = (
    "k_stride",
    "k_head_stride",
    "k_tail_stride",
    "k_tail_head_stride",
    "v_stride",
    "v_head_stride",
    "k_scales_stride",
    "k_scales_head_stride",
    "v_scales_stride",
    "v_scales_head_stride",
)
ALIGNED_BYTES = 16
"""Triton tells a compiler whether an address is a multiple of this."""
ALIGNED_ELEMENTS = 16
"""The same for strides."""


class Slots(NamedTuple):
    """A table of slots or pages, and each request's row in it."""

    table: torch.Tensor
    """[R, W] int32."""
    rows: torch.Tensor | None
    """[at least B] int64; None if request i of the batch has row i."""
    page_size: int
    begins_with_encoder: bool
    """Whether the decoder's keys follow the encoder's; else they begin in column 0."""


class Results(NamedTuple):
    """The tensor that kernels write to. Each token's heads must be contiguous."""

    out: torch.Tensor
    """[T, Hq, Dv]."""
    lse: torch.Tensor | None
    """[T, Hq] float32."""

    @classmethod
    def of(cls, call: AttentionCall) -> Results:
        """The caller's tensors; new ones in place of those that kernels cannot write to."""
        q, layer, out, lse = call.q, call.layer, call.out, call.lse
        if out is None or out.stride()[1:] != (layer.v_head_dim, 1):
            out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        if lse is not None and lse.stride()[1] != 1:
            lse = lse.new_empty(lse.shape)
        return cls(out, lse)

    def handed_to(self, call: AttentionCall) -> torch.Tensor:
        """The result of a call, whose own LSE is filled."""
        if call.lse is not None and self.lse is not None and self.lse is not call.lse:
            call.lse.copy_(self.lse)
        return self.out


class Keys(NamedTuple):
    """K and V of the pool's slots, or of the call's tokens."""

    k: torch.Tensor
    """[rows, Hkv, D]."""
    v: torch.Tensor
    """[rows, Hkv, Dv]; not read if the layer is latent."""
    k_rope: torch.Tensor | None = None
    """[rows, 1, rope], if K does not hold it."""
    k_scales: torch.Tensor | None = None
    """[rows, Hkv, words] int32, each of 4 scales, if K and V are 4-bit floats: those are then
    words of 8 values, [rows, Hkv, D / 8] int32."""
    v_scales: torch.Tensor | None = None
    v_starts: torch.Tensor | None = None
    """[B] int32: each request's first row of V, if its rows lie side by side and not as K's."""

    @classmethod
    def of_pool(cls, pool: KVPool, layer: LayerSpec) -> Keys:
        k, v = pool.get_kv_buffer(layer.layer_id)
        scales = pool.get_scale_buffers(layer.layer_id)
        if scales is None:
            return cls(k, v)
        k, v = k.view(torch.int32), v.view(torch.int32)
        return cls(k, v, None, *map(_scale_words, scales))

    @classmethod
    def of_call(cls, call: AttentionCall) -> Keys:
        """Keys of a call that `has_own_kv`."""
        assert call.k is not None
        return cls(call.k, call.k if call.v is None else call.v, call.k_rope)

    def whole(self, dtype: torch.dtype) -> Keys:
        """These keys as whole rows of that dtype, copied only if they are not."""
        rope = None if self.k_rope is None else whole_rows(self.k_rope, dtype)
        return Keys(whole_rows(self.k, dtype), whole_rows(self.v, dtype), rope)


def has_whole_rows(rows: torch.Tensor) -> bool:
    """Whether each row of each head begins at a multiple of 16 bytes, and Triton tells a compiler
    so. rows: [n, heads, width]."""
    token, head, column = rows.stride()
    is_spaced = token % ALIGNED_ELEMENTS == 0 and head % ALIGNED_ELEMENTS == 0 and column == 1
    return is_spaced and rows.data_ptr() % ALIGNED_BYTES == 0


def whole_rows(rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The rows for kernels that copy 16 bytes at a time: themselves or a copy. dtype: theirs unless
    given."""
    dtype = dtype or rows.dtype
    if rows.dtype == dtype and has_whole_rows(rows):
        return rows
    # `contiguous` may keep the strides of dims of one.
    return torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)


def strides(
    q: torch.Tensor, tail: torch.Tensor | None, results: Results, slots: Slots | None
) -> tuple[int, ...]:
    """The strides, in the order of STRIDES."""
    out, lse = results
    return (
        *q.stride()[:2],
        *((0, 0) if tail is None else tail.stride()[:2]),
        out.stride()[0],
        0 if lse is None else lse.stride()[0],
        0 if slots is None else slots.table.stride()[0],
    )


def key_strides(keys: Keys, tail: torch.Tensor | None) -> tuple[int, ...]:
    """The strides, in the order of KEY_STRIDES."""
    return (
        *keys.k.stride()[:2],
        *((0, 0) if tail is None else tail.stride()[:2]),
        *keys.v.stride()[:2],
        *((0, 0) if keys.k_scales is None else keys.k_scales.stride()[:2]),
        *((0, 0) if keys.v_scales is None else keys.v_scales.stride()[:2]),
    )


def _scale_words(scales: torch.Tensor) -> torch.Tensor:
    """The scales [slots, H, n] of a pool as int32 [slots, H, words]."""
    slots, heads, count = scales.shape
    whole = (slots, heads, -(-count // 4) * 4)
    return scales.view(torch.uint8).as_strided(whole, scales.stride()).view(torch.int32)
