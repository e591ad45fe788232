"""The keys of a batch, read from the request table: as CSR or as a table of pages."""

from __future__ import annotations

import torch

from attnmux.core.adapters.indices.segments import lay_out, page_numbers, store
from attnmux.core.contract.arguments import check_lens, check_table, described
from attnmux.core.contract.tables import RequestTable
from attnmux.core.facts.errors import InvalidInput

_INT32_MAX = torch.iinfo(torch.int32).max


def kv_indices(
    req_to_token: torch.Tensor | RequestTable,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
    total: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[kv_indptr[-1]]: the slot of every key, or the number of every page, request by request.

    req_to_token: the request table, or its tensor of slots.
    kv_indptr: [B + 1] int32, as `kv_indptr` builds it for the same page size.
    kv_start: [B] int32, the column where a request's keys begin; 0 by default.
    total: kv_indptr[-1]. out: int32; without total all of it is written, with 0 past the last.
    """
    table, step, kv_start = _columns(req_to_token, page_size, kv_start)
    batch_size = check_table(table, req_pool_indices)
    check_lens("kv_indptr", kv_indptr, batch_size + 1)
    cells = req_pool_indices * table.shape[1]
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
        cells = cells + kv_start
    if table.numel() <= _INT32_MAX:
        cells = cells.to(torch.int32)
    # A place past the end reads cell 0, of padding's row, whose slots are 0
    cells = lay_out(cells, kv_indptr, step=step, total=total, out=out)
    slots = table.view(-1).index_select(0, cells)
    return store(page_numbers(slots, step), out, torch.int32)


def _columns(
    source: torch.Tensor | RequestTable, page_size: int, kv_start: torch.Tensor | None
) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """The table to read, its columns from one page to the next, and kv_start in its columns."""
    InvalidInput.check_at_least(1, "page_size", page_size)
    if isinstance(source, torch.Tensor):
        return source, page_size, kv_start
    table, tokens = source.columns_for(page_size)
    if kv_start is not None and tokens > 1:
        kv_start = kv_start // tokens
    return table, page_size // tokens, kv_start


def page_table(
    req_to_token: torch.Tensor | RequestTable,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
    max_len: int | None = None,
    width_multiple: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, width]: the pages of each request's keys, then 0, the reserved page.

    Also called a block table. With page size 1 it is a table of slots.

    req_to_token: the request table, or its tensor of slots.
    kv_lens: [B] int32, keys a request. kv_start: [B] int32, the column where they begin.
    max_len: the longest of kv_lens, or more. width is ceil(max_len / page_size), rounded up
    to a multiple of `width_multiple`.
    out: int32 [at least B, W], contiguous rows or not; without max_len the width is W.
    """
    source, step, first = _columns(req_to_token, page_size, kv_start)
    batch_size = check_table(source, req_pool_indices)
    check_lens("kv_lens", kv_lens, batch_size)
    InvalidInput.check_at_least(1, "width_multiple", width_multiple)
    width = table_width(kv_lens, page_size, max_len, width_multiple, out)
    if first is None:
        # At the start of each page that begins within the table
        table = source[:, : width * step : step].index_select(0, req_pool_indices)
    else:
        check_lens("kv_start", first, batch_size)
        steps = torch.arange(0, width * step, step, device=first.device)
        # Columns past the row's end repeat its last value, until the end of requests is set to 0
        places = (first.unsqueeze(1) + steps).clamp_(max=source.shape[1] - 1)
        cells = places + (req_pool_indices * source.shape[1]).unsqueeze(1)
        table = source.view(-1).index_select(0, cells.view(-1)).view(cells.shape)
    columns = torch.arange(
        0, table.shape[1] * page_size, page_size, dtype=torch.int32, device=table.device
    )
    page_numbers(table, step).masked_fill_(columns >= kv_lens.unsqueeze(1), 0)
    if out is None and table.shape[1] == width:
        return table
    result = table.new_zeros((batch_size, width)) if out is None else out[:batch_size, :width]
    result[:, table.shape[1] :].zero_()
    result[:, : table.shape[1]].copy_(table)
    return result


def table_width(
    kv_lens: torch.Tensor,
    page_size: int,
    max_len: int | None,
    width_multiple: int,
    out: torch.Tensor | None,
) -> int:
    """Columns of `page_table`'s result. Raises InvalidInput for a buffer that has too few."""
    if out is not None and (
        out.dtype != torch.int32 or out.dim() != 2 or out.shape[0] < kv_lens.shape[0]
    ):
        raise InvalidInput(
            "out", got=described(out), expected=f"int32 [at least {kv_lens.shape[0]}, width]"
        )
    if max_len is None and out is not None:
        return out.shape[1]
    if max_len is None:
        max_len = int(kv_lens.max()) if kv_lens.shape[0] else 0
    width = -(-max_len // (page_size * width_multiple)) * width_multiple
    if out is not None and out.shape[1] < width:
        raise InvalidInput("out", got=f"{out.shape[1]} columns", expected=f"at least {width}")
    return width
