"""The stored form of K and V: unchanged, or floats of 8 or 4 bits with scales.

4-bit floats are NVFP4. A value is E2M1: a sign and one of `MAGNITUDES`. Each `BLOCK` of values of a
head shares a scale in E4M3, and all values of a layer share one in float32, its k_scale or v_scale:

    K = E2M1 value * E4M3 block scale * k_scale
"""

from __future__ import annotations

import itertools

import torch

from attnmux.core.contract.dtypes import BLOCK, FP4_DTYPE, FP8_DTYPES, checked_scale
from attnmux.core.facts.errors import InvalidInput

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower 3 bits of a value; the fourth is the sign."""
SCALE_DTYPE = torch.float8_e4m3fn
SCALE_ALIGNMENT = 4
"""Bytes. A head's scales begin at multiples of this, so that kernels read them as words."""

_HALFWAY = tuple((low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES))


def pack_rows(rows: torch.Tensor, divisor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] of an activation dtype in 4-bit floats. divisor: the layer's scale.

    Returns values [..., D / 2] of `FP4_DTYPE` and their blocks' scales [..., D / BLOCK] of
    `SCALE_DTYPE`.

    With x = rows / divisor in float32, a block's scale is the largest |x| / 6, rounded to nearest
    even and at most 448. Each value is the E2M1 number nearest to x / scale. Ties go to the number
    whose last bit is 0. Numbers beyond 6 become 6. Comparisons with multiples of the scale,
    which float32 represents, decide it exactly: no quotient is rounded. A block whose scale rounds
    to 0 holds zeros. A block with NaN has the scale NaN, which makes all of it NaN.
    Raises InvalidInput if D is not a multiple of `BLOCK`.
    """
    check_width("rows", rows.shape[-1])
    rows = rows.detach().float()
    if divisor != 1:
        rows = quotients(rows, divisor)
    *shape, width = rows.shape
    blocks = rows.reshape(*shape, width // BLOCK, BLOCK)
    size = blocks.abs()
    largest = torch.finfo(SCALE_DTYPE).max
    scales = quotients(size.amax(-1), MAGNITUDES[-1]).clamp(max=largest).to(SCALE_DTYPE)
    unit = scales.float().unsqueeze(-1)
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for code, halfway in enumerate(_HALFWAY):
        # From an even code, a number halfway to the next one rounds down
        passes = size > unit * halfway if code % 2 == 0 else size >= unit * halfway
        codes += passes
    codes |= torch.signbit(blocks).to(torch.uint8) << 3
    codes = codes.masked_fill_(~(unit > 0), 0).flatten(-2)
    low, high = codes[..., ::2], codes[..., 1::2]
    return (low | high << 4).view(FP4_DTYPE), scales


def unpack_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., D] float32, exact: the inverse of `pack_rows`, without the layer's scale.

    values, scales: as `pack_rows` returns them, of any strides.
    """
    packed = values.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    numbers = torch.tensor(
        (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)), device=packed.device
    )
    *shape, width = codes.shape
    blocks = numbers[codes.int()].view(*shape, width // BLOCK, BLOCK)
    blocks *= scales.float().unsqueeze(-1)
    return blocks.view(codes.shape)


def check_width(argument: str, width: int) -> None:
    """Raise InvalidInput unless 4-bit floats can hold heads of `width` values."""
    if width % BLOCK:
        raise InvalidInput(
            argument,
            got=width,
            expected=f"a multiple of {BLOCK}: as many 4-bit floats share a scale",
        )


def scale_bytes(width: int) -> int:
    """Bytes that the scales of a head of `width` values take, with their alignment."""
    words = -(-width // (BLOCK * SCALE_ALIGNMENT))
    return words * SCALE_ALIGNMENT


def quotients(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """values / divisor in the dtype of `values`, each rounded once, on every device.

    Of a number as divisor, torch multiplies by the reciprocal on a GPU, which rounds twice; kernels
    divide. Does not synchronise.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def quantise(rows: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """`rows`, of an activation dtype, as a pool of `dtype` stores them; of 4-bit floats see
    `stored_parts`.

    An 8-bit float is `rows / scale` (in float32 unless the scale is 1), rounded to nearest even and
    saturated: infinities and values beyond the largest finite one (448 in e4m3, 57344 in e5m2,
    240 in e4m3fnuz) become that one, and NaN stays NaN. torch's own cast returns NaN or an infinity
    there, depending on version and dtype. Other dtypes ignore the scale.
    Raises InvalidInput for a scale that is not a positive number.
    """
    rows = rows.detach()
    if dtype not in FP8_DTYPES:
        return rows.to(dtype)
    divisor = checked_scale(scale)
    if divisor != 1:
        rows = quotients(rows.float(), divisor)
    # Every activation dtype represents both limits exactly
    largest = torch.finfo(dtype).max
    return rows.clamp(-largest, largest).to(dtype)


def stored_parts(
    rows: torch.Tensor, dtype: torch.dtype, scale: float | None
) -> tuple[torch.Tensor, ...]:
    """All that a pool of `dtype` stores of `rows`: the quantised rows or, of 4-bit floats, packed
    values and the scales of their blocks (see `pack_rows`).

    Raises InvalidInput as `quantise`, and for rows that 4-bit floats cannot hold.
    """
    if dtype != FP4_DTYPE:
        return (quantise(rows, dtype, scale),)
    return pack_rows(rows, checked_scale(scale))
