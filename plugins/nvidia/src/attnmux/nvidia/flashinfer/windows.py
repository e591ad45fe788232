"""The stretch of each request's keys that a window lets its new tokens see."""

from __future__ import annotations

import torch


def window_view(
    seq_lens: torch.Tensor,
    sliding_window_size: int,
    *,
    q_lens: torch.Tensor | int = 1,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that the last q_lens tokens of each request can see: how many they are, and the
    column of the request's row where they begin, [B] int32 each.

    Token i sees keys j with i - w <= j <= i, so the view begins w keys before the first of these
    tokens; for one token it is the last w + 1 keys.

    seq_lens: [B] int32, all keys, the new tokens' own included (in verify seq + d).
    q_lens: new tokens a request, [B] int32 or one number for all; 1 is decode.
    page_size: the view begins at the start of a page, so it may begin with up to page_size - 1
    keys outside of the window, which the kernel masks.
    kv_start: [B] int32, the column where the request's keys begin; the view's starts add to it.
    """
    start = (seq_lens - q_lens - sliding_window_size).clamp_(min=0)
    start -= start % page_size
    return seq_lens - start, start if kv_start is None else start + kv_start
