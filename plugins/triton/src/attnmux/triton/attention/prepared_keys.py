"""A step's keys of 8 bits as the kernel for tiles on Hopper reads them.

Both K and V are widened to 16 bits; with rounded queries, K stays as it is; with rounded weights, V
does too, and is turned so that each of its columns has its keys side by side.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnmux.triton.attention.layer import TritonLayer
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.wide_places import WidePlaces
from attnmux.triton.kernels.widen import PIECE, turn_values, widen_keys
from attnmux.triton.launches.bound_kernel import BoundKernel
from attnmux.triton.launches.dispatch import Rounding
from attnmux.triton.launches.operands import Keys, Slots
from attnmux.triton.launches.shapes import next_power_of_2

BLOCK = 64
"""Keys that a program widens."""


class PreparedKeys:
    """The launches that prepare a layer's keys, in memory that each step takes anew."""

    def __init__(self, layer: TritonLayer, rounds: Rounding) -> None:
        self._layer, self._rounds = layer, rounds
        self._bound: dict[Hashable, BoundKernel] = {}

    @property
    def row_bytes(self) -> int:
        """Bytes that a row of `WidePlaces` takes for each KV head."""
        k_dim, v_dim = self._layer.shape.dims
        if self._rounds == "all":
            return int(PIECE.value * v_dim)
        return 2 * (k_dim + v_dim if self._rounds == "none" else v_dim)

    def __call__(
        self, keys: Keys, step: TritonStep, slots: Slots, places: WidePlaces, dtype: torch.dtype
    ) -> tuple[Keys, Slots]:
        """Some heads' keys [slots, heads, dims] of the pool, and where the step's are in the
        result. slots: where they are in the pool. dtype: of 16 bits."""
        heads, v_dim = keys.v.shape[1:]
        bound = self._bind(slots, heads)
        strides = *keys.v.stride()[:2], slots.table.stride()[0]
        where = slots.table, slots.rows, step.batch.seq_lens, places.starts
        batch_size = step.batch.batch_size
        if self._rounds == "all":
            turned = keys.v.new_empty(places.total, heads, v_dim * PIECE.value)
            grid = heads, places.longest, batch_size
            words = keys.v.view(torch.int32)
            strides = *words.stride()[:2], slots.table.stride()[0]
            bound(grid, (words, *where, turned.view(torch.int32)), strides)
            return Keys(keys.k, turned, v_starts=places.starts), slots
        v = keys.v.new_empty(places.total, heads, v_dim, dtype=dtype)
        k = None
        if self._rounds == "none":
            k = v.new_empty(places.total, heads, keys.k.shape[2])
        grid = heads, -(-places.longest // BLOCK), batch_size
        strides = *keys.k.stride()[:2], *strides
        bound(grid, (keys.k, keys.v, *where, k, v), strides, (), dtype)
        if k is None:
            return Keys(keys.k, v, v_starts=places.starts), slots
        return Keys(k, v), places.table

    def _bind(self, slots: Slots, heads: int) -> BoundKernel:
        variant = slots.page_size, slots.rows is None, heads
        if variant not in self._bound:
            k_dim, v_dim = self._layer.shape.dims
            fixed = {"HEADS": heads, "PAGE": slots.page_size}
            where = "slots", "rows", "seq_lens", "starts"
            tensors: tuple[str, ...]
            numbers: tuple[str, ...] = ("v_stride", "v_head_stride", "slots_stride")
            if self._rounds == "all":
                kernel, tensors = turn_values, ("v", *where, "turned")
                fixed |= {"WORDS": v_dim // 4}
            else:
                kernel, tensors = widen_keys, ("k", "v", *where, "wide_k", "wide_v")
                numbers = "k_stride", "k_head_stride", *numbers
                fixed |= {"REAL_D": k_dim, "REAL_DV": v_dim, "BLOCK_N": BLOCK}
                fixed |= {"D": next_power_of_2(k_dim), "DV": next_power_of_2(v_dim)}
            self._bound[variant] = BoundKernel(
                self._layer.launcher,
                kernel,
                fixed,
                tensors=tensors,
                numbers=numbers,
                options={"num_warps": 4},
            )
        return self._bound[variant]
