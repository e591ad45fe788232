"""The one table from canonical dtype names to torch's dtypes."""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput

_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_e2m1": torch.float4_e2m1fn_x2,
}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a canonical name ("bfloat16", "fp8_e4m3", …) or of its alias ("bf16").

    "fp4_e2m1" is torch's packed dtype: an element holds two values.
    Raises InvalidInput for a name that is not in the table.
    """
    try:
        return _TORCH_DTYPES[_ALIASES.get(name, name)]
    except KeyError:
        raise InvalidInput("dtype", came=repr(name), expected=_choices()) from None


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a torch dtype.

    Raises InvalidInput for a dtype that attention knows no name for.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise InvalidInput("dtype", came=dtype, expected=_choices()) from None


def _choices() -> str:
    return f"one of {', '.join([*_TORCH_DTYPES, *_ALIASES])}"
