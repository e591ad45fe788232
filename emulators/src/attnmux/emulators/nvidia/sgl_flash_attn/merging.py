"""What `sgl_kernel.attention` has to merge attention over two sets of keys."""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.sgl_flash_attn.operands import check

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def merge_state_v2(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v_merged: torch.Tensor | None = None,
    s_merged: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, D] and natural-logarithm LSE [T, H] of two sets of keys, as those of both.

    Of an LSE of -inf or +inf nothing is taken; where both are, the result is NaN.
    Raises RuntimeError for what is not contiguous, which the library reads as if it were.
    """
    v_merged = torch.empty_like(v_a) if v_merged is None else v_merged
    s_a, s_b = s_a.float(), s_b.float()
    s_merged = torch.empty_like(s_a) if s_merged is None else s_merged
    for operand in (v_a, v_b, v_merged, s_a, s_b, s_merged):
        check(operand.is_contiguous(), "input must be contiguous")
    check(v_a.shape == v_b.shape == v_merged.shape, "states must have one shape")
    check(v_merged.dtype in _DTYPES, f"Unsupported data type of O: {v_merged.dtype}")
    check(v_a.dtype == v_b.dtype == v_merged.dtype, "states are read as of the result's dtype")
    check(s_a.shape == s_b.shape == s_merged.shape == v_a.shape[:2], "LSE must be [T, H]")
    check(v_a.shape[-1] * v_a.itemsize % 16 == 0, "headsize must be multiple of pack_size")
    of_a, of_b = (lse.double().masked_fill(lse.isinf(), -torch.inf) for lse in (s_a, s_b))
    top = torch.maximum(of_a, of_b)
    weight_a, weight_b = (of_a - top).exp(), (of_b - top).exp()
    total = weight_a + weight_b
    share_a, share_b = ((weight / total).unsqueeze(-1) for weight in (weight_a, weight_b))
    merged, lse = v_a.double() * share_a + v_b.double() * share_b, total.log() + top
    return v_merged.copy_(merged), s_merged.copy_(lse)
