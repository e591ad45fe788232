"""`attnmux.core.indices` on a device, one launch each, with the same signatures and results.

Only the builders that take several operations in torch are here.
"""

from __future__ import annotations

import torch

from attnmux.core import check_at_least
from attnmux.core.plugin import KVView, check_lens, check_table, front, table_width
from attnmux.triton.kernels.indices import (
    fill_last_page_lens,
    fill_page_table,
    gather_slots,
    sum_lens,
    view_windows,
)

BLOCK = 1024
"""Values that a program computes."""


def cu_seqlens(lens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[B + 1]: 0 and the running sums of lens [B] int32."""
    check_lens("lens", lens)
    return _running_sums(lens, out)


def kv_indptr(
    kv_lens: torch.Tensor, *, page_size: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: where each request's slots (or pages) begin in `kv_indices`."""
    check_lens("kv_lens", kv_lens)
    check_at_least(1, "page_size", page_size)
    return _running_sums(kv_lens, out, page_size=page_size)


def mask_indptr(
    q_lens: torch.Tensor | int, kv_lens: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: where each request's q_len · kv_len values begin in a flat custom mask."""
    batch_size = check_lens("kv_lens", kv_lens)
    if isinstance(q_lens, torch.Tensor):
        check_lens("q_lens", q_lens, batch_size)
    return _running_sums(kv_lens, out, factor=q_lens)


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
    """[kv_indptr[-1]]: the slot of every key, or the number of every page, request by request."""
    batch_size = check_table(req_to_token, req_pool_indices)
    check_lens("kv_indptr", kv_indptr, batch_size + 1)
    check_at_least(1, "page_size", page_size)
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
    if total is None:
        total = int(kv_indptr[-1]) if out is None else out.shape[0]
    result = front(out, total, req_to_token)
    if total:
        gather_slots[_grid(total)](
            req_to_token,
            req_to_token.shape[1],
            req_to_token.numel(),
            req_pool_indices.contiguous(),
            kv_indptr.contiguous(),
            None if kv_start is None else kv_start.contiguous(),
            result,
            result.stride(0),
            total,
            batch_size,
            batch_size.bit_length(),
            PAGE=page_size,
            HAS_STARTS=kv_start is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return result


def kv_last_page_len(
    kv_lens: torch.Tensor, page_size: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B]: keys in each request's last page, 1 … page_size; page_size without keys."""
    batch_size = check_lens("kv_lens", kv_lens)
    check_at_least(1, "page_size", page_size)
    result = front(out, batch_size, kv_lens)
    if batch_size:
        fill_last_page_lens[_grid(batch_size)](
            kv_lens.contiguous(),
            result,
            result.stride(0),
            batch_size,
            PAGE=page_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return result


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
    """[B, width]: the pages of each request's keys, then 0, the reserved page."""
    batch_size = check_table(req_to_token, req_pool_indices)
    check_lens("kv_lens", kv_lens, batch_size)
    check_at_least(1, "page_size", page_size)
    check_at_least(1, "width_multiple", width_multiple)
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
    width = table_width(kv_lens, page_size, max_len, width_multiple, out)
    if out is None:
        result = torch.empty((batch_size, width), dtype=torch.int32, device=kv_lens.device)
    else:
        result = out[:batch_size, :width]
    if result.numel():
        fill_page_table[(batch_size, -(-width // BLOCK))](
            req_to_token,
            req_to_token.shape[1],
            req_pool_indices.contiguous(),
            kv_lens.contiguous(),
            None if kv_start is None else kv_start.contiguous(),
            result,
            *result.stride(),
            width,
            PAGE=page_size,
            HAS_STARTS=kv_start is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return result


def window_view(
    seq_lens: torch.Tensor,
    sliding_window_size: int,
    *,
    q_lens: torch.Tensor | int = 1,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
    out: KVView | None = None,
) -> KVView:
    """The keys that the last q_lens tokens of each request can see."""
    batch_size = check_lens("seq_lens", seq_lens)
    check_at_least(1, "page_size", page_size)
    of_requests = q_lens if isinstance(q_lens, torch.Tensor) else None
    if of_requests is not None:
        check_lens("q_lens", of_requests, batch_size)
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
    view = KVView(
        front(None if out is None else out.kv_lens, batch_size, seq_lens),
        front(None if out is None else out.kv_start, batch_size, seq_lens),
    )
    if batch_size:
        view_windows[_grid(batch_size)](
            seq_lens.contiguous(),
            None if of_requests is None else of_requests.contiguous(),
            q_lens if of_requests is None else 0,
            None if kv_start is None else kv_start.contiguous(),
            view.kv_lens,
            view.kv_lens.stride(0),
            view.kv_start,
            view.kv_start.stride(0),
            batch_size,
            WINDOW=sliding_window_size,
            PAGE=page_size,
            HAS_Q_LENS=of_requests is not None,
            HAS_STARTS=kv_start is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return view


def _running_sums(
    lens: torch.Tensor,
    out: torch.Tensor | None,
    *,
    page_size: int = 1,
    factor: torch.Tensor | int = 1,
) -> torch.Tensor:
    batch_size = lens.shape[0]
    result = front(out, batch_size + 1, lens)
    factors = factor.contiguous() if isinstance(factor, torch.Tensor) else None
    sum_lens[(1,)](
        lens.contiguous(),
        factors,
        factor if factors is None else 1,
        result,
        result.stride(0),
        batch_size,
        PAGE=page_size,
        HAS_FACTORS=factors is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return result


def _grid(length: int) -> tuple[int]:
    return (-(-length // BLOCK),)
