"""TARGET_VERIFY: every request has d draft tokens behind its prefix."""

from __future__ import annotations

import torch

from attnmux.core.indices._segments import store
from attnmux.core.indices.args import check_lens
from attnmux.core.indices.ragged import cu_seqlens, uniform_indptr
from attnmux.core.sizes import check_positive


def verify_qo_indptr(
    batch_size: int,
    draft_token_num: int,
    *,
    device: torch.device | str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B + 1]: where each request's draft tokens begin, in steps of d."""
    check_positive("draft_token_num", draft_token_num)
    return uniform_indptr(batch_size, draft_token_num, device=device, out=out)


def verify_kv_lens(
    seq_lens: torch.Tensor, draft_token_num: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B]: keys a request, seq + d; seq_lens [B] int32 are the prefixes alone."""
    check_lens("seq_lens", seq_lens)
    check_positive("draft_token_num", draft_token_num)
    return store(seq_lens + draft_token_num, out, torch.int32)


def mask_indptr(
    q_lens: torch.Tensor | int, kv_lens: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[B + 1]: where each request's q_len · kv_len values begin in a flat custom mask.

    q_lens: [B] int32, or one number for all, d in verify. kv_lens: [B] int32, in verify seq + d.
    Kernels take these offsets as int32, so the mask has to have less than 2**31 values.
    """
    batch_size = check_lens("kv_lens", kv_lens)
    if isinstance(q_lens, torch.Tensor):
        check_lens("q_lens", q_lens, batch_size)
    return cu_seqlens(kv_lens * q_lens, out=out)
