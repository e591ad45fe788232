"""Rows and pages for the branches that a draft model follows from each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnmux.core import ForwardBatch, ForwardMode, ReqToTokenPool
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState


class BranchRows:
    """A request table whose rows are branches: K for each request, those of a request together.

    A branch reads the whole pages of its request's cached tokens, and has pages of its own after
    them: they begin with a copy of the request's last page, if that is filled in part.
    """

    def __init__(self, steps: StepBuilder, *, topk: int, max_batch_size: int) -> None:
        """steps: of the requests; has a KV pool without windows. topk: K."""
        table = steps.req_to_token_pool
        self.table = ReqToTokenPool(max_batch_size * topk, table.max_context_len, steps.device)
        self._steps = steps
        self._topk = topk
        self._pages: torch.Tensor | None = None

    def open(self, states: Sequence[SequenceState], num_new: int) -> ForwardBatch:
        """Branches with slots for n tokens more, as the batch that a `MultiStepDraftBackend`
        prepares.

        Each request has cached tokens and none pending, and its context has room for n more. Call
        `close` before the next `open`. Raises PoolExhausted, changing nothing, without enough
        pages.
        """
        steps, pool = self._steps, self._steps.token_to_kv_pool
        assert pool is not None
        page_size, width = steps.allocator.page_size, self.table.max_context_len
        lens = np.array([state.num_cached for state in states]).repeat(self._topk)
        rows = np.array([state.row for state in states]).repeat(self._topk)
        num, filled = len(lens), lens % page_size
        counts = filled + num_new
        pages_each = -(-counts // page_size)
        # Of each cell that a branch fills: its branch, and its place after the shared pages
        branch = np.arange(num).repeat(counts)
        place = np.arange(len(branch)) - (counts.cumsum() - counts)[branch]
        column = (lens - filled)[branch] + place
        copied = place < filled[branch]
        parts = [
            rows,
            lens + 1,
            (lens[:, None] + np.arange(num_new)).ravel(),
            (pages_each.cumsum() - pages_each)[branch] + place // page_size,
            place % page_size,
            (branch + 1) * width + column,
            (rows[branch] * width + column)[copied],
            copied.nonzero()[0],
            (~copied).nonzero()[0],
        ]
        moved = torch.from_numpy(np.concatenate(parts)).to(steps.device, non_blocking=True)
        source_rows, first_lens, positions, page, offset, cells, *copies, new = (
            torch.split_with_sizes(moved, [len(part) for part in parts])
        )
        with steps.taking():
            pages = steps.allocator.alloc_pages(int(pages_each.sum()))
            slots = pages.index_select(0, page) * page_size + offset
            self._share(source_rows, int(lens.max()))
            self.table.req_to_token.view(-1).index_copy_(0, cells, slots.int())
            if copies[0].shape[0]:
                cached = steps.req_to_token_pool.req_to_token.view(-1).index_select(0, copies[0])
                pool.move(cached.long(), slots.index_select(0, copies[1]))
        self._pages = pages
        steps.intact = True
        lens_cpu = torch.from_numpy((lens + 1).astype(np.int32))
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=num,
            req_pool_indices=torch.arange(1, num + 1, device=steps.device),
            seq_lens=first_lens.to(torch.int32),
            out_cache_loc=slots.index_select(0, new),
            positions=positions,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=int(lens.sum()) + num,
        )

    def _share(self, rows: torch.Tensor, longest: int) -> None:
        """Copy the cells of the requests' rows [R], one for each branch, up to the longest."""
        cells = self._steps.req_to_token_pool.req_to_token[:, :longest]
        self.table.req_to_token[1 : len(rows) + 1, :longest] = cells.index_select(0, rows)

    def close(self) -> None:
        """Free the branches' pages. Does nothing if they are free."""
        pages, self._pages = self._pages, None
        if pages is not None:
            self._steps.intact = False
            self._steps.allocator.free_pages(pages)
            self._steps.intact = True

    def forget(self) -> None:
        """The pages were freed with all others."""
        self._pages = None
