"""Merging the results of each rank over its own keys."""

from __future__ import annotations

from typing import Protocol

import torch

from attnmux.distributed.ranks import RankGroup


class RankMerger(Protocol):
    """`pack` and `merge_packed` for a device, as a plugin may offer them (`rank_merger`)."""

    def fits(self, out: torch.Tensor) -> bool:
        """Whether it takes results of this dtype and of these dims."""

    def pack(self, out: torch.Tensor, lse: torch.Tensor, size: int) -> torch.Tensor: ...

    def merge_packed(self, packed: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def exchange_and_merge(
    group: RankGroup, out: torch.Tensor, lse: torch.Tensor, merger: RankMerger | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's heads over the keys of all ranks, in one all-to-all.

    out: [T, size * H, Dv] of all heads over this rank's keys. lse: [T, size * H] float32, natural
    logarithms, -inf if this rank has no key. Returns [T, H, Dv] in the dtype of `out` and
    [T, H] float32. merger: used for results that it takes, in place of plain operations.
    """
    if merger is not None and merger.fits(out):
        received = group.all_to_all(merger.pack(out, lse, group.size))
        return merger.merge_packed(received, out.shape[-1])
    packed = pack(out, lse, group.size)
    return merge_packed(group.all_to_all(packed), out.shape[-1])


def pack(out: torch.Tensor, lse: torch.Tensor, size: int) -> torch.Tensor:
    """[size, T, H, Dv + n] in the dtype of `out`: the heads of each rank, and after the values of a
    head its float32 LSE in n columns."""
    tokens, dim = out.shape[0], out.shape[-1]
    columns = lse.dtype.itemsize // out.dtype.itemsize
    packed = out.new_empty((size, tokens, out.shape[1] // size, dim + columns))
    packed[..., :dim] = out.view(tokens, size, -1, dim).transpose(0, 1)
    by_rank = lse.view(tokens, size, -1).transpose(0, 1).contiguous()
    packed[..., dim:] = by_rank.view(out.dtype).view(*by_rank.shape, columns)
    return packed


def merge_packed(packed: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, dim], lse [T, H]) of every rank's results [size, T, H, dim + n], see `pack`.

    lse = log(sum(exp(lse_r))); out = sum(exp(lse_r - lse) * out_r), in float32. If no rank has a
    key, the result is 0 and -inf. The result of a rank without keys is not read, so it may be NaN.
    """
    lse = packed[..., dim:].contiguous().view(torch.float32).squeeze(-1)
    total = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - total.masked_fill(total.isneginf(), 0)).unsqueeze(-1)
    parts = torch.where(weights > 0, packed[..., :dim].float(), 0)
    return (weights * parts).sum(0).to(packed.dtype), total
