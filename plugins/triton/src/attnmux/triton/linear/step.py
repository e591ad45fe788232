"""A step with many new tokens, as the kernels of linear layers read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import cu_seqlens

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch

CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearStep:
    """The tokens and chunks of a step."""

    starts: torch.Tensor
    """[B + 1] int32"""
    num_tokens: int
    """Tokens of all requests; a step may have padding after them."""
    longest: int
    """New tokens of the longest request."""
    request_of: torch.Tensor
    """[T] int32; -1 for padding."""
    chunk_indptr: torch.Tensor
    """[B + 1] int32"""
    chunk_first: torch.Tensor
    """[N] int32"""
    chunk_count: torch.Tensor
    """[N] int32"""

    @classmethod
    def of(cls, batch: ForwardBatch) -> LinearStep:
        """Raises InvalidInput without lengths. Reads them from the device if there is no host
        mirror."""
        new = batch.extend_seq_lens
        if new is None or batch.extend_prefix_lens is None:
            expected = "new and cached lengths in an extend step"
            raise InvalidInput("extend_seq_lens", got=None, expected=expected)
        mirror = batch.extend_seq_lens_cpu
        lens = (new.cpu() if mirror is None else mirror).long()
        total, device = int(lens.sum()), new.device
        counts = (lens + CHUNK - 1) // CHUNK
        chunk_request = torch.arange(len(lens)).repeat_interleave(counts)
        rank = torch.arange(len(chunk_request)) - (counts.cumsum(0) - counts)[chunk_request]
        first = (lens.cumsum(0) - lens)[chunk_request] + rank * CHUNK
        count = (lens[chunk_request] - rank * CHUNK).clamp(max=CHUNK)
        request_of = torch.arange(len(lens)).repeat_interleave(lens)
        padding = torch.full((batch.num_tokens - total,), -1)
        parts = [first, count, counts.cumsum(0), request_of, padding]
        packed = torch.cat(parts).to(torch.int32).to(device)
        sizes = [len(part) for part in parts]
        chunk_first, chunk_count, ends, *tokens = packed.split(sizes)  # type: ignore[no-untyped-call]  # torch's own
        return cls(
            starts=cu_seqlens(new),
            num_tokens=total,
            longest=int(lens.max()) if len(lens) else 0,
            request_of=torch.cat(tokens),
            chunk_indptr=torch.cat([ends.new_zeros(1), ends]),
            chunk_first=chunk_first,
            chunk_count=chunk_count,
        )


def strided(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor of tokens, and the stride of these."""
    return x, x.stride(0)
