"""V of a step's requests end to end, for kernels that read a request's last tile whole."""

from __future__ import annotations

import torch


def bounded(v: torch.Tensor, num_requests: int) -> torch.Tensor:
    """V [T, Hkv, Dv] with its dtype's largest numbers in place of NaN and infinities.

    Kernels of FlashAttention 3's kind load whole tiles by TMA and multiply by 0 the rows after a
    request's last: NaN there would reach the request. Its own request still gets no sensible
    result. Returns V itself, not a copy, for one request, which nothing follows.
    """
    return v if num_requests < 2 else v.nan_to_num(nan=torch.finfo(v.dtype).max)
