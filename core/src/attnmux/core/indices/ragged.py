"""Where each request's part of a packed tensor starts, and which position each token has."""

from __future__ import annotations

import torch

from attnmux.core.indices._segments import lay_out, store
from attnmux.core.indices.args import check_lens, front
from attnmux.core.sizes import check_positive


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
    check_positive("step", step)
    result = torch.arange(0, batch_size * step + 1, step, dtype=torch.int32, device=device)
    return store(result, out, torch.int32)


def extend_positions(
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *,
    total: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T] int64: place of each new token in its sequence.

    total: T, the sum of extend_lens. out: int64; without total all of it is written, with 0
    past the last token.
    """
    check_lens("prefix_lens", prefix_lens, check_lens("extend_lens", extend_lens))
    positions = lay_out(prefix_lens, cu_seqlens(extend_lens), total=total, out=out)
    return store(positions, out, torch.int64)
