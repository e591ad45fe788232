"""What a kernel is compiled for and what it is given: the shapes of one bucket of steps.

Everything that a step changes but the number of keys is of a size in `KernelSpec`, so that a spec
is compiled once. Sizes of captured tensors are compiled in: where they vary, Inductor's C++
template of torch 2.13 mixes up their names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import FlexKernelOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """One shape bucket of one kind of layer."""

    device: torch.device
    dtype: torch.dtype
    num_tiles: int
    tile_size: int
    """Queries of a tile."""
    group: int
    """Query heads a KV head: all of them are rows of one tile."""
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    latent: bool
    """V is the front of K."""
    block: int
    listed: int
    """Room for blocks in a tile's list."""
    capacity: int
    """Room for blocks in `columns`."""
    has_items: bool
    """Whether `KernelInput.hidden` is given."""
    mask_room: int
    """Room for the flat custom mask; 0 without one."""
    split: bool
    """Blocks that need no look at the mask are listed apart."""
    capped: bool
    lse: bool

    @property
    def rows(self) -> int:
        return self.group * self.tile_size

    @property
    def kernel_options(self) -> FlexKernelOptions:
        """Tiles of Triton's kernels, held to blocks and to the shared memory of an SM."""
        if self.device.type == "cpu":
            return {}
        row_bytes = 2 * max(self.qk_head_dim, self.v_head_dim) * self.dtype.itemsize
        keys = 64
        while keys > 16 and (self.block % keys or keys * row_bytes > 2**15):
            keys //= 2
        return {"BLOCK_M": min(64, self.block_rows), "BLOCK_N": keys}

    @property
    def block_rows(self) -> int:
        """Rows of a block of queries: on a GPU a power of two that a tensor core can take."""
        if self.device.type == "cpu":
            return self.rows
        return max(16, 1 << (self.rows - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelInput:
    """The arguments that a step and a rule give, the same for all of their layers."""

    columns: torch.Tensor
    """[capacity] int32: the first column of each block."""
    first: torch.Tensor
    end: torch.Tensor
    """[N, tile_size] int32: the range of columns that a query sees."""
    num_partial: torch.Tensor
    """[N, 1, 1] int32."""
    partial: torch.Tensor
    """[N, 1, 1, reach] int32."""
    num_whole: torch.Tensor | None
    whole: torch.Tensor | None
    hidden: tuple[torch.Tensor, torch.Tensor] | None
    mask: tuple[torch.Tensor, torch.Tensor] | None
    """As on `Ranges`."""


def heads_first(cache: torch.Tensor) -> torch.Tensor:
    """[S, Hkv, D] as [1, Hkv, S, D], a view."""
    return cache.transpose(0, 1).unsqueeze(0)


def list_room(device: torch.device, num_tiles: int, listed: int, capacity: int) -> int:
    """Elements of memory for the lists of all tiles."""
    return (num_tiles - 1) * listed + _reach(device, listed, capacity)


def block_list(memory: torch.Tensor, num_tiles: int, listed: int, capacity: int) -> torch.Tensor:
    """[N, 1, 1, reach] over `list_room` elements, `listed` of which are each tile's own."""
    reach = _reach(memory.device, listed, capacity)
    return memory.as_strided((num_tiles, 1, 1, reach), (listed, listed, listed, 1))


def _reach(device: torch.device, listed: int, capacity: int) -> int:
    """Length of a list as the kernel is told it. The C++ one wants room for every block there is;
    lists then overlap where it reads none of them."""
    return max(listed, capacity) if device.type == "cpu" else listed
