"""Arithmetic sequences laid end to end: what every ragged builder is made of."""

from __future__ import annotations

import torch

from attnmux.core.indices.args import front


def lay_out(
    starts: torch.Tensor,
    indptr: torch.Tensor,
    *,
    step: int = 1,
    total: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """starts[i] + step · j at place indptr[i] + j, in the dtype of starts.

    starts: [B] int. indptr: [B + 1] int32. As long as `total`, which is indptr[-1]; without it
    as long as `out`, whose other contents do not matter, and 0 from indptr[-1] on; without
    both a synchronisation finds the length.
    """
    if total is None and out is not None:
        return _lay_out_static(starts, indptr, step, out.shape[0])
    total = int(indptr[-1]) if total is None else total
    values = (starts - indptr[:-1] * step).repeat_interleave(indptr.diff(), output_size=total)
    values += _ramp(values, step)
    return values


def segment_of_place(indptr: torch.Tensor, length: int) -> torch.Tensor:
    """[length] int32: which segment of indptr [B + 1] each place lies in; B past the last."""
    places = torch.arange(length, dtype=torch.int32, device=indptr.device)
    return torch.searchsorted(indptr[1:], places, right=True, out_int32=True)


def store(values: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """values as dtype, at the front of out where it is given."""
    if out is None:
        return values.to(dtype)
    return front(out, values.shape[0], values, dtype).copy_(values)


def _lay_out_static(
    starts: torch.Tensor, indptr: torch.Tensor, step: int, length: int
) -> torch.Tensor:
    bases = torch.cat([starts - indptr[:-1] * step, starts.new_zeros(1)])
    segment = segment_of_place(indptr, length)
    values = bases[segment]
    values += _ramp(values, step)
    return values.masked_fill_(segment == starts.shape[0], 0)


def _ramp(values: torch.Tensor, step: int) -> torch.Tensor:
    ramp = torch.arange(values.shape[0], dtype=values.dtype, device=values.device)
    return ramp if step == 1 else ramp.mul_(step)
