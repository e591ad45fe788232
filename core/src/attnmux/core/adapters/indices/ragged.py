"""From the lengths of a batch alone: offsets, positions, counts of pages, stretches of windows."""

from __future__ import annotations

import torch

from attnmux.core.adapters.indices.segments import lay_out, store
from attnmux.core.contract.arguments import check_lens, front
from attnmux.core.facts.errors import InvalidInput


def cu_seqlens(lens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[B + 1]: 0 and the running sums of lens.

    `cu_seqlens_q` and `qo_indptr` of the new tokens, `cu_seqlens_k` of the keys.
    """
    result = front(out, check_lens("lens", lens) + 1, lens)
    result[:1].zero_()
    torch.cumsum(lens, 0, dtype=torch.int32, out=result[1:])
    return result


def uniform_indptr(
    batch_size: int, step: int, *, device: torch.device | str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: 0, step, 2 · step, … for requests that all have `step` tokens."""
    InvalidInput.check_at_least(1, "step", step)
    result = torch.arange(0, batch_size * step + 1, step, dtype=torch.int32, device=device)
    return store(result, out, torch.int32)


def extend_positions(
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    total: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T] int64: the place of each new token in its sequence.

    total: T, the sum of extend_lens. out: int64; without total all of it is written, with 0
    past the last token.
    """
    check_lens("prefix_lens", prefix_lens, check_lens("extend_lens", extend_lens))
    positions = lay_out(prefix_lens, cu_seqlens(extend_lens), total=total, out=out)
    return store(positions, out, torch.int64)


def kv_indptr(
    kv_lens: torch.Tensor, *, page_size: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: where each request's slots (or pages) begin in `kv_indices`.

    kv_lens: [B] int32, keys a request.
    """
    check_lens("kv_lens", kv_lens)
    InvalidInput.check_at_least(1, "page_size", page_size)
    pages = kv_lens if page_size == 1 else (kv_lens + (page_size - 1)) // page_size
    return cu_seqlens(pages, out=out)


def mask_indptr(
    q_lens: torch.Tensor | int, kv_lens: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: where each request's q_len · kv_len values begin in a flat custom mask.

    q_lens: [B] int32, or one number for all, d in verify. kv_lens: [B] int32, in verify seq + d.
    Kernels take these offsets as int32, so the mask must have fewer than 2**31 values.
    """
    batch_size = check_lens("kv_lens", kv_lens)
    if isinstance(q_lens, torch.Tensor):
        check_lens("q_lens", q_lens, batch_size)
    return cu_seqlens(kv_lens * q_lens, out=out)
