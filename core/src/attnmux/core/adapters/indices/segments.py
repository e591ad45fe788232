"""The parts of index builders: sequences laid end to end, and pages of slots."""

from __future__ import annotations

import torch

from attnmux.core.contract.arguments import front


def lay_out(
    starts: torch.Tensor,
    indptr: torch.Tensor,
    *,
    step: int = 1,
    total: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """starts[i] + step · j at place indptr[i] + j, in the dtype of starts.

    starts: [B] int. indptr: [B + 1] int32. The length is `total`, which is indptr[-1]. Without it
    the length is that of `out`, with 0 from indptr[-1] on. Without both, a synchronisation
    reads the length.
    """
    if total is None and out is not None:
        return _lay_out_static(starts, indptr, step, out.shape[0])
    total = int(indptr[-1]) if total is None else total
    values = (starts - indptr[:-1] * step).repeat_interleave(indptr.diff(), output_size=total)
    values += _ramp(values, step)
    return values


def segment_of_place(indptr: torch.Tensor, length: int) -> torch.Tensor:
    """[length] int32: the segment of indptr [B + 1] of each place; B past the last."""
    places = torch.arange(length, dtype=torch.int32, device=indptr.device)
    return torch.searchsorted(indptr[1:], places, right=True, out_int32=True)


def store(values: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """values as dtype, written to the front of out if given."""
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


def page_numbers(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The page of each slot, computed in place."""
    if page_size == 1:
        return slots
    if page_size & (page_size - 1) == 0:
        return slots.bitwise_right_shift_(page_size.bit_length() - 1)
    return slots.floor_divide_(page_size)
