"""The keys of a batch as a table of pages, one row a request."""

from __future__ import annotations

import math

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.indices._pages import page_numbers
from attnmux.core.indices.args import check_lens, check_table
from attnmux.core.sizes import check_positive


def page_table(
    req_to_token: torch.Tensor,
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

    Also called a block table. A page size of 1 gives a table of slots.

    kv_lens: [B] int32, keys a request. kv_start: [B] int32, the column where they begin.
    max_len: the longest of kv_lens, or more. width is ceil(max_len / page_size), rounded up
    to a multiple of `width_multiple` (see `block_count_multiple`).
    out: int32 [at least B, W], contiguous rows or not; without max_len the width is W.
    """
    batch_size = check_table(req_to_token, req_pool_indices)
    check_lens("kv_lens", kv_lens, batch_size)
    check_positive("page_size", page_size)
    check_positive("width_multiple", width_multiple)
    width = table_width(kv_lens, page_size, max_len, width_multiple, out)
    if kv_start is None:
        table = _leading_pages(req_to_token, req_pool_indices, width, page_size)
    else:
        check_lens("kv_start", kv_start, batch_size)
        table = _pages_from(req_to_token, req_pool_indices, kv_start, width, page_size)
    columns = torch.arange(
        0, table.shape[1] * page_size, page_size, dtype=torch.int32, device=table.device
    )
    page_numbers(table, page_size).masked_fill_(columns >= kv_lens.unsqueeze(1), 0)
    if out is None and table.shape[1] == width:
        return table
    result = table.new_zeros((batch_size, width)) if out is None else out[:batch_size, :width]
    result[:, table.shape[1] :].zero_()
    result[:, : table.shape[1]].copy_(table)
    return result


def block_count_multiple(
    page_size: int, *, tile_tokens: int = 128, pages_per_block: int = 1
) -> int:
    """What a block table's width must be a multiple of, as its `width_multiple`.

    A kernel that walks `tile_tokens` keys at a time needs whole tiles of pages, and one that
    copies the table `pages_per_block` entries at a time needs whole blocks of entries. TRT-LLM's
    MLA decode has tiles of 128: 4 pages of 32, 2 pages of 64.
    """
    for argument, value in (
        ("page_size", page_size),
        ("tile_tokens", tile_tokens),
        ("pages_per_block", pages_per_block),
    ):
        check_positive(argument, value)
    return math.lcm(tile_tokens // math.gcd(tile_tokens, page_size), pages_per_block)


def whole_page_lens(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B]: tokens of lens that fill whole pages, which is what a prefix cache may share."""
    check_lens("lens", lens)
    check_positive("page_size", page_size)
    return lens - lens % page_size


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
            "out",
            came=f"{out.dtype} of shape {tuple(out.shape)}",
            expected=f"int32 [at least {kv_lens.shape[0]}, width]",
        )
    if max_len is None and out is not None:
        return out.shape[1]
    if max_len is None:
        max_len = int(kv_lens.max()) if kv_lens.shape[0] else 0
    width = -(-max_len // (page_size * width_multiple)) * width_multiple
    if out is not None and out.shape[1] < width:
        raise InvalidInput("out", came=f"{out.shape[1]} columns", expected=f"at least {width}")
    return width


def _leading_pages(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, width: int, page_size: int
) -> torch.Tensor:
    """Slots [B, up to width] at the start of each page, as far as the table reaches."""
    return req_to_token[:, : width * page_size : page_size].index_select(0, req_pool_indices)


def _pages_from(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_start: torch.Tensor,
    width: int,
    page_size: int,
) -> torch.Tensor:
    """Slots [B, width] at the start of each page from column kv_start on.

    Columns past the row's end repeat its last slot; `page_table` sets them to 0.
    """
    max_context = req_to_token.shape[1]
    steps = torch.arange(0, width * page_size, page_size, device=kv_start.device)
    columns = (kv_start.unsqueeze(1) + steps).clamp_(max=max_context - 1)
    cells = columns + (req_pool_indices * max_context).unsqueeze(1)
    return req_to_token.view(-1).index_select(0, cells.view(-1)).view(cells.shape)
