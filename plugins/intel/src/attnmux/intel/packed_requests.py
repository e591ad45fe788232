"""Requests with new tokens, and their own keys as pages.

In a step of many queries the kernel for decode takes every request with fewer than two queries. The
result of a request without queries would overwrite the next request's. So these requests are
left out. Keys that come with a call are copied to pages: without pages the kernels expect more than
one query of each request, and take no sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import Keys

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRequests:
    """The requests of a step that have new tokens."""

    new: tuple[int, ...]
    """Their new tokens."""
    kept: torch.Tensor | None
    """[kept] int64: their places in the batch; None if that are all."""

    @classmethod
    def of(cls, batch: ForwardBatch, queries_each: int | None) -> PackedRequests:
        """queries_each: new tokens of each request if all have as many.

        Raises InvalidInput if the batch lacks its lengths on the host.
        """
        if queries_each is not None:
            return cls(new=(queries_each,) * batch.batch_size, kept=None)
        lens = batch.extend_seq_lens_cpu
        if lens is None:
            expected = "the lengths on the host, as requests without new tokens are left out"
            raise InvalidInput("extend_seq_lens_cpu", got=None, expected=expected)
        new = lens.tolist()
        places = [place for place, length in enumerate(new) if length]
        kept = None
        if len(places) < len(new):
            kept = torch.tensor(places, device=batch.seq_lens.device)
        return cls(new=tuple(new[place] for place in places), kept=kept)

    @property
    def num_queries(self) -> int:
        return sum(self.new)

    @property
    def longest(self) -> int:
        """New tokens of the request that has most."""
        return max(self.new, default=0)

    def bounds(self, of_all: torch.Tensor) -> torch.Tensor:
        """[kept + 1] int32, where each one's queries begin. of_all: [B + 1] of all requests."""
        if self.kept is None:
            return of_all
        return torch.cat([of_all[:1], of_all[self.kept + 1]])

    def keys(self, of_all: Keys) -> Keys:
        """Their rows of the tables and lengths of all requests."""
        if self.kept is None:
            return of_all
        return Keys(page_table=of_all.page_table[self.kept], lens=of_all.lens[self.kept])

    def own_pages(
        self, page_size: int, key_tile: int, *rows: torch.Tensor
    ) -> tuple[Keys, tuple[torch.Tensor, ...]]:
        """Copies of rows [T, H, D] of their new tokens as pages [pages, page_size, H, D], 0 after
        each request's, with their table. A table's row has room for a multiple of `key_tile`."""
        num_pages = -(-self.longest // key_tile) * key_tile // page_size
        slots = torch.cat(
            [
                index * num_pages * page_size + torch.arange(count)
                for index, count in enumerate(self.new)
            ]
        ).to(rows[0].device)
        shape = (len(self.new) * num_pages, page_size)
        pages = []
        for row in rows:
            copied = row.new_zeros((shape[0] * page_size, *row.shape[1:]))
            copied[slots] = row[: self.num_queries]
            pages.append(copied.view(*shape, *row.shape[1:]))
        table = torch.arange(shape[0], dtype=torch.int32, device=slots.device)
        lens = torch.tensor(self.new, dtype=torch.int32, device=slots.device)
        return Keys(page_table=table.view(-1, num_pages), lens=lens), tuple(pages)
