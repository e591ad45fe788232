"""The tensors of a layer's call, and what kernels are told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnmux.core.kv import KVPool
from attnmux.core.layer import LayerSpec
from attnmux.triton.slots import Slots

QUERIES = "q", "q_tail", "out", "lse"
"""Tensors that every call brings."""
STRIDES = (
    "q_stride",
    "q_head_stride",
    "q_tail_stride",
    "q_tail_head_stride",
    "out_stride",
    "lse_stride",
    "slots_stride",
)
"""How far their rows are apart, and those of the table of slots."""
KEY_STRIDES = (
    "k_stride",
    "k_head_stride",
    "k_tail_stride",
    "k_tail_head_stride",
    "v_stride",
    "v_head_stride",
)
ALIGNED_BYTES = 16
"""That an address is a multiple of is what Triton tells a compiler."""
ALIGNED_ELEMENTS = 16
"""As ALIGNED_BYTES, of strides."""


class Results(NamedTuple):
    """Where a call's results go."""

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """K and V, of the pool's slots or of the call's tokens."""

    k: torch.Tensor
    """[rows, Hkv, D]."""
    v: torch.Tensor
    """[rows, Hkv, Dv]; a latent layer's is not read."""
    k_rope: torch.Tensor | None = None
    """[rows, 1, rope], where K does not hold it."""

    @classmethod
    def of(cls, pool: KVPool, layer: LayerSpec) -> Keys:
        """What the pool stores of a layer."""
        k, v = pool.get_kv_buffer(layer.layer_id)
        return cls(k=k, v=v)

    def whole(self, dtype: torch.dtype) -> Keys:
        """Of that dtype, in whole rows; these where they are so."""
        k, v = whole_rows(self.k, dtype), whole_rows(self.v, dtype)
        return self if k is self.k and v is self.v else Keys(k=k, v=v, k_rope=self.k_rope)


def has_whole_rows(rows: torch.Tensor) -> bool:
    """[n, heads, width]: whether each row of a head begins at a multiple of 16 bytes, and Triton
    says so to a compiler."""
    token, head, column = rows.stride()
    is_spaced = token % ALIGNED_ELEMENTS == 0 and head % ALIGNED_ELEMENTS == 0 and column == 1
    return is_spaced and rows.data_ptr() % ALIGNED_BYTES == 0


def whole_rows(rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """These rows, or a copy for kernels that copy 16 bytes at a time. dtype: if not theirs."""
    dtype = dtype or rows.dtype
    if rows.dtype == dtype and has_whole_rows(rows):
        return rows
    # `contiguous` may keep the strides of dims of one.
    return torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)


def strides(
    q: torch.Tensor, tail: torch.Tensor | None, results: Results, slots: Slots | None
) -> tuple[int, ...]:
    """In the order of STRIDES."""
    out, lse = results
    return (
        *q.stride()[:2],
        *((0, 0) if tail is None else tail.stride()[:2]),
        out.stride()[0],
        0 if lse is None else lse.stride()[0],
        0 if slots is None else slots.table.stride()[0],
    )


def key_strides(keys: Keys, tail: torch.Tensor | None) -> tuple[int, ...]:
    """In the order of KEY_STRIDES."""
    return (
        *keys.k.stride()[:2],
        *((0, 0) if tail is None else tail.stride()[:2]),
        *keys.v.stride()[:2],
    )


def as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.view(torch.uint8)
