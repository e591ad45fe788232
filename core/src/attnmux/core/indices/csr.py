"""The keys of a batch as CSR: slots or pages end to end, and where each request's begin."""

from __future__ import annotations

import torch

from attnmux.core.indices._pages import page_counts, page_numbers
from attnmux.core.indices._segments import lay_out, store
from attnmux.core.indices.args import check_lens, check_table
from attnmux.core.indices.ragged import cu_seqlens
from attnmux.core.sizes import check_positive

_INT32_MAX = torch.iinfo(torch.int32).max


def kv_indptr(
    kv_lens: torch.Tensor, *, page_size: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: where each request's slots (or pages) begin in `kv_indices`.

    kv_lens: [B] int32, keys a request.
    """
    check_lens("kv_lens", kv_lens)
    check_positive("page_size", page_size)
    return cu_seqlens(page_counts(kv_lens, page_size), out=out)


def kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
    total: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[kv_indptr[-1]]: the slot of every key, or the number of every page, request by request.

    kv_indptr: [B + 1] int32, as `kv_indptr` builds it for the same page size.
    kv_start: [B] int32, the column where a request's keys begin; 0 by default.
    total: kv_indptr[-1]. out: int32; without total all of it is written, with 0 past the last.
    """
    indices = _gather(
        req_to_token, req_pool_indices, kv_indptr, page_size, kv_start, total=total, out=out
    )
    return store(page_numbers(indices, page_size), out, torch.int32)


def kv_last_page_len(
    kv_lens: torch.Tensor, page_size: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B]: keys in each request's last page, 1 … page_size.

    Without keys it is page_size, so that (pages - 1) · page_size + last_page_len is the length
    for every request.
    """
    check_lens("kv_lens", kv_lens)
    check_positive("page_size", page_size)
    return store((kv_lens - 1) % page_size + 1, out, torch.int32)


def out_cache_loc(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    kv_start: torch.Tensor | None = None,
    total: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T] int64: slots of the new tokens, read back from the request table.

    prefix_lens, extend_lens: [B] int32. kv_start: [B] int32, encoder slots before them.
    total: T, the sum of extend_lens. out: int64; without total all of it is written, with 0,
    padding's slot, past the last token.
    """
    batch_size = check_lens("extend_lens", extend_lens)
    check_lens("prefix_lens", prefix_lens, batch_size)
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
    start = prefix_lens if kv_start is None else prefix_lens + kv_start
    slots = _gather(
        req_to_token,
        req_pool_indices,
        cu_seqlens(extend_lens),
        page_size=1,
        kv_start=start,
        total=total,
        out=out,
    )
    return store(slots, out, torch.int64)


def _gather(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    indptr: torch.Tensor,
    page_size: int,
    kv_start: torch.Tensor | None,
    *,
    total: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The table's slot at every page_size-th column from kv_start on, request by request."""
    batch_size = check_table(req_to_token, req_pool_indices)
    check_lens("kv_indptr", indptr, batch_size + 1)
    check_positive("page_size", page_size)
    cells = req_pool_indices * req_to_token.shape[1]
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
        cells = cells + kv_start
    if req_to_token.numel() <= _INT32_MAX:
        cells = cells.to(torch.int32)
    # A place past the end reads cell 0: row 0 is padding's, and its slots are 0.
    cells = lay_out(cells, indptr, step=page_size, total=total, out=out)
    return req_to_token.view(-1).index_select(0, cells)
