"""The keys that a request needs in layers with a sliding window."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.core.arguments import check_lens, check_positive, front
from attnmux.core.indices._segments import store


class KVView(NamedTuple):
    """A stretch of each request's keys."""

    kv_lens: torch.Tensor
    """[B] int32: keys of the stretch."""
    kv_start: torch.Tensor
    """[B] int32: column of the request's row where it begins."""


def window_view(
    seq_lens: torch.Tensor,
    sliding_window_size: int,
    *,
    q_lens: torch.Tensor | int = 1,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
    out: KVView | None = None,
) -> KVView:
    """The keys that the last q_lens tokens of each request can see.

    Token i sees keys j with i - w <= j <= i, so the view begins w keys before the first of these
    tokens; for one token it is the last w + 1 keys. A window below 0 is off: all keys.

    seq_lens: [B] int32, all keys, the new tokens' own included (in verify seq + d).
    q_lens: new tokens a request, [B] int32 or one number for all; 1 is decode.
    page_size: the view begins at the start of a page, so it may begin with up to page_size - 1
    keys outside of the window, which the kernel masks.
    kv_start: [B] int32, the column where the request's keys begin; the view's starts add to it.
    out: buffers of at least B values for both fields.
    """
    batch_size = check_lens("seq_lens", seq_lens)
    check_positive("page_size", page_size)
    if isinstance(q_lens, torch.Tensor):
        check_lens("q_lens", q_lens, batch_size)
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
    lens_out = start_out = None
    if out is not None:
        lens_out = front(out.kv_lens, batch_size, seq_lens)
        start_out = front(out.kv_start, batch_size, seq_lens)
    if sliding_window_size < 0:
        start = torch.zeros_like(seq_lens)
    else:
        start = (seq_lens - q_lens - sliding_window_size).clamp_(min=0)
        start -= start % page_size
    kv_lens = store(seq_lens - start, lens_out, torch.int32)
    if kv_start is not None:
        start += kv_start
    return KVView(kv_lens, store(start, start_out, torch.int32))
