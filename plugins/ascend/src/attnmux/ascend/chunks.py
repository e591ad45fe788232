"""Prefill over latents in chunks: the operator takes few queries a request, and contiguous pages.

A request's new tokens are cut in chunks. Each chunk counts as a request whose keys end with its
last query. Latents and rotary parts of the keys are copied out of the pool's joint rows, page by
page, with a table of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from attnmux.ascend.npu_kernels import MOST_REQUESTS
from attnmux.core import InvalidInput

if TYPE_CHECKING:
    from attnmux.ascend.host_lens import HostLens

QUERIES = 16
"""Queries of a request that the operator takes over latents of 512."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks:
    """The chunks of a step, and where the pages of their keys are copied to."""

    bounds: list[int]
    """Where each chunk's queries end."""
    keys: list[int]
    """Keys of each chunk."""
    table: torch.Tensor
    """[chunks, width] int32: the copied pages of each chunk's request."""
    pages: tuple[torch.Tensor, torch.Tensor]
    """Rows and columns of the request's page table, [copied pages] int64 each."""
    first_keys: tuple[tuple[int, int], ...]
    """Place of each request's first key among those of the copied pages, and its number of keys."""

    @classmethod
    def of(cls, lens: HostLens, page_size: int, device: torch.device) -> Chunks:
        """Raises InvalidInput for more chunks than the operator takes."""
        requests, ends, keys = [], [], []
        for index, (new, total) in enumerate(zip(lens.new, lens.keys, strict=True)):
            for first in range(0, new, QUERIES):
                last = min(first + QUERIES, new)
                requests.append(index)
                ends.append(last - first)
                keys.append(total - new + last)
        if len(requests) > MOST_REQUESTS:
            raise InvalidInput(
                "extend_num_tokens",
                got=f"{lens.num_queries} tokens, {len(requests)} chunks of up to {QUERIES}",
                expected=f"at most {MOST_REQUESTS} chunks: prefill in steps of fewer tokens",
            )
        # A request without queries needs no pages.
        totals = [total if new else 0 for new, total in zip(lens.new, lens.keys, strict=True)]
        counts = torch.tensor([-(-total // page_size) for total in totals])
        used = torch.arange(int(counts.max())) < counts.unsqueeze(1)
        rows, columns = used.nonzero(as_tuple=True)
        copied = torch.zeros(used.shape, dtype=torch.int32)
        copied[rows, columns] = torch.arange(len(rows), dtype=torch.int32)
        firsts = ((counts.cumsum(0) - counts) * page_size).tolist()
        return cls(
            bounds=list(accumulate(ends)),
            keys=keys,
            table=copied[requests].to(device),
            pages=(rows.to(device), columns.to(device)),
            first_keys=tuple(zip(firsts, totals, strict=True)),
        )

    @property
    def has_one_query_each(self) -> bool:
        """Whether no chunk has more: then each query sees all keys."""
        return len(self.bounds) == self.bounds[-1]

    def copied(self, cache: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
        """[copied pages, page, 576] of the pool's pages [pages, page, 576], by its table."""
        return cache[page_table[self.pages]]

    def filled(self, rows: torch.Tensor, page_size: int) -> torch.Tensor:
        """[copied pages, page, 576] of the rows [keys, 576] of all requests, 0 after each's."""
        flat = rows.new_zeros((len(self.pages[0]) * page_size, rows.shape[-1]))
        begin = 0
        for first, count in self.first_keys:
            flat[first : first + count] = rows[begin : begin + count]
            begin += count
        return flat.view(-1, page_size, rows.shape[-1])
