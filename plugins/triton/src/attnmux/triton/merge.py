"""Merges the results of attention over two sets of keys, such as a prefix and the rest."""

from __future__ import annotations

import torch

from attnmux.core import ACTIVATION_DTYPES, InvalidInput
from attnmux.triton.kernels.merge import merge_rows
from attnmux.triton.shapes import next_power_of_2

MOST_COLUMNS = 512
"""Columns of a tile; a wider result has several tiles."""
TILE = 2048
"""Values of a tile."""


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of a and of b, which share none: `out` and its LSE.

    lse = logaddexp(lse_a, lse_b); out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b.

    out_a, out_b, out: [T, Hq, Dv], bfloat16, float16 or float32, of any strides. lse_a, lse_b,
    lse: [T, Hq] float32, natural logarithms. Where both are -inf the result is 0 and -inf; the
    `out_*` of a side that is -inf is not read. `out`, of the dtype of out_a, and `lse` are
    allocated unless given, and may be those of a or b. Computed in float32.
    Raises InvalidInput, before anything is written, for other shapes, dtypes or devices.
    """
    out = _empty_like(out_a) if out is None else out
    lse = _empty_like(lse_a) if lse is None else lse
    _check(out_a, lse_a, out_b, lse_b, out, lse)
    num_tokens, heads, width = out_a.shape
    num_rows = num_tokens * heads
    if not num_rows:
        return out, lse
    block_d = min(next_power_of_2(width), MOST_COLUMNS)
    block_r = max(TILE // block_d, 1)
    merge_rows[(-(-num_rows // block_r),)](
        out_a,
        *out_a.stride(),
        lse_a,
        *lse_a.stride(),
        out_b,
        *out_b.stride(),
        lse_b,
        *lse_b.stride(),
        out,
        *out.stride(),
        lse,
        *lse.stride(),
        num_rows,
        HEADS=heads,
        DV=width,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out, lse


def _empty_like(part: torch.Tensor) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device=part.device)


def _check(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    if out_a.dim() != 3:
        raise InvalidInput("out_a", got=f"shape {tuple(out_a.shape)}", expected="[T, Hq, Dv]")
    for argument, tensor in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        _check_one(argument, tensor, out_a.shape, ACTIVATION_DTYPES, out_a.device)
    for argument, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        _check_one(argument, tensor, out_a.shape[:2], (torch.float32,), out_a.device)


def _check_one(
    argument: str,
    tensor: torch.Tensor,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if tensor.shape != shape:
        raise InvalidInput(
            argument, got=f"shape {tuple(tensor.shape)}", expected=f"shape {tuple(shape)}"
        )
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidInput(argument, got=tensor.dtype, expected=names)
    if tensor.device != device:
        raise InvalidInput(
            argument, got=f"a tensor on {tensor.device}", expected=f"one on {device}, as out_a is"
        )
