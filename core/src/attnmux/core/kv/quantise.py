"""The stored form of K and V: unchanged, or floats of 8 or 4 bits with scales."""

from __future__ import annotations

import math

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.kv.four_bits import DTYPE as FP4_DTYPE
from attnmux.core.kv.four_bits import pack_rows, quotients

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations, which a pool stores unscaled."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
"""8-bit dtypes, which a pool stores scaled."""

SCALED_DTYPES = (*FP8_DTYPES, FP4_DTYPE)
"""Dtypes that a pool stores scaled."""

STORABLE_DTYPES = ACTIVATION_DTYPES + FP8_DTYPES
"""Dtypes that every pool stores, a value an element."""


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
    values and the scales of their blocks (see `four_bits`).

    Raises InvalidInput as `quantise`, and for rows that 4-bit floats cannot hold.
    """
    if dtype != FP4_DTYPE:
        return (quantise(rows, dtype, scale),)
    return tuple(pack_rows(rows, checked_scale(scale)))


def checked_scale(scale: float | None) -> float:
    """The scale, 1 for None. Raises InvalidInput unless it is a positive, finite number."""
    if scale is None:
        return 1.0
    if not (scale > 0 and math.isfinite(scale)):
        raise InvalidInput("scale", got=scale, expected="a positive, finite number")
    return scale
