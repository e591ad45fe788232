"""Canonical dtype names, torch's dtypes, and those that a KV pool stores."""

from __future__ import annotations

import math

import torch

from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.values import canonical_dtype

BLOCK = 16
"""4-bit floats that share a scale, see `contract/quantise.py`."""
FP4_DTYPE = torch.float4_e2m1fn_x2
"""The dtype of packed values: an element holds two, the first in the lower bits."""

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations, which a pool stores unscaled."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
"""8-bit dtypes, which a pool stores scaled."""

SCALED_DTYPES = (*FP8_DTYPES, FP4_DTYPE)
"""Dtypes that a pool stores scaled."""

STORABLE_DTYPES = ACTIVATION_DTYPES + FP8_DTYPES
"""Dtypes that every pool stores, a value an element."""

_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp4_e2m1": torch.float4_e2m1fn_x2,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a canonical name ("bfloat16", "fp8_e4m3", …) or of its alias ("bf16").

    "fp4_e2m1" is torch's packed dtype: an element holds two values. A pool of it is NVFP4.
    Raises InvalidInput for any other name.
    """
    return _TORCH_DTYPES[canonical_dtype(name)]


def checked_scale(scale: float | None) -> float:
    """The scale, 1 for None. Raises InvalidInput unless it is a positive, finite number."""
    if scale is None:
        return 1.0
    if not (scale > 0 and math.isfinite(scale)):
        raise InvalidInput("scale", got=scale, expected="a positive, finite number")
    return scale
