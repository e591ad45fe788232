"""`pack` and `merge_packed` of attention over several ranks on a device, in one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.triton.kernels.rank_merge import merge_packed_rows, pack_rows
from attnmux.triton.launches.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext


class RankMerger:
    """The two functions for rows of whole float32 words, as `fits` says."""

    def fits(self, out: torch.Tensor) -> bool:
        """Whether a row of `out` [T, H, Dv] and its LSE are whole float32 words."""
        return out.shape[-1] * out.itemsize % 4 == 0 and out.stride(-1) == 1

    def pack(self, out: torch.Tensor, lse: torch.Tensor, size: int) -> torch.Tensor:
        """[size, T, H, Dv + n] of out [T, size * H, Dv] and lse [T, size * H] float32: the heads of
        each rank, and after the values of a head its LSE in n columns.

        Raises InvalidInput if `fits` does not hold.
        """
        if not self.fits(out):
            got = f"{out.dtype} of shape {tuple(out.shape)}"
            raise InvalidInput("out", got=got, expected="rows of whole float32 words")
        tokens, all_heads, dim = out.shape
        columns = dim + 4 // out.itemsize
        packed = out.new_empty((size, tokens, all_heads // size, columns))
        if packed.numel():
            pack_rows[(tokens * all_heads,)](
                out,
                *out.stride()[:2],
                lse,
                *lse.stride(),
                packed,
                packed.view(torch.float32),
                tokens,
                HEADS=all_heads // size,
                SIZE=size,
                DV=dim,
                COLUMNS=columns,
                WORDS=columns * out.itemsize // 4,
                BLOCK_D=next_power_of_2(dim),
                num_warps=1 if dim <= 128 else 4,
            )
        return packed

    def merge_packed(self, packed: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, dim], lse [T, H] float32) of every rank's results, as `pack` makes them.

        Computed in float32. If no rank has a key, the result is 0 and -inf.
        """
        size, tokens, heads, columns = packed.shape
        out = packed.new_empty((tokens, heads, dim))
        lse = packed.new_empty((tokens, heads), dtype=torch.float32)
        if out.numel():
            merge_packed_rows[(tokens * heads,)](
                packed,
                packed.view(torch.float32),
                out,
                lse,
                tokens * heads,
                SIZE=size,
                DV=dim,
                COLUMNS=columns,
                WORDS=columns * packed.itemsize // 4,
                BLOCK_D=next_power_of_2(dim),
                num_warps=1 if dim <= 128 else 4,
            )
        return out, lse


def make_merger(context: BackendContext) -> RankMerger:
    """The functions, tried once on the context's device."""
    made = RankMerger()
    out = torch.zeros(1, 2, 2, dtype=torch.bfloat16, device=context.device)
    packed = made.pack(out, torch.zeros(1, 2, device=context.device), 2)
    made.merge_packed(packed, 2)
    return made
