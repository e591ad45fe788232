"""Which KV pools the kernels read."""

from __future__ import annotations

import torch

from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.core.layer import LayerSpec

FP8 = torch.float8_e4m3fn
"""The only 8-bit float that most of the kernels read."""

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def check_page_size(context: BackendContext, page_size: int) -> None:
    """Raises InvalidInput for a pool of pages of another size."""
    pool = context.token_to_kv_pool
    if pool.page_size != page_size:
        raise InvalidInput(
            "token_to_kv_pool",
            came=f"pages of {pool.page_size} tokens",
            expected=f"pages of {page_size}",
        )


def check_sixteen_bits(context: BackendContext) -> None:
    """Raises InvalidInput for a pool that is not of the queries' 16-bit dtype."""
    dtype, asked = context.token_to_kv_pool.dtype, context.request.dtype
    if dtype not in SIXTEEN_BITS or (asked is not None and dtype != torch_dtype(asked)):
        raise InvalidInput(
            "token_to_kv_pool",
            came=dtype,
            expected=f"{asked or 'bfloat16 or float16'}, as the queries are",
        )


def check_own_or_fp8(context: BackendContext) -> None:
    """Raises InvalidInput for a pool that is neither of the queries' dtype nor of e4m3."""
    dtype, asked = context.token_to_kv_pool.dtype, context.request.dtype
    if dtype != FP8 and asked is not None and dtype != torch_dtype(asked):
        raise InvalidInput(
            "token_to_kv_pool", came=dtype, expected=f"{asked}, as the queries are, or {FP8}"
        )


def check_bfloat16_or_fp8(context: BackendContext) -> None:
    """Raises InvalidInput for a pool of any other dtype."""
    dtype = context.token_to_kv_pool.dtype
    if dtype not in (torch.bfloat16, FP8):
        raise InvalidInput("token_to_kv_pool", came=dtype, expected=f"{torch.bfloat16} or {FP8}")


def not_in_pool(layer: LayerSpec) -> AttnmuxError:
    """The error of a call that reads keys of a layer that the pool does not store."""
    return AttnmuxError(
        f"layer {layer.layer_id} is not in the KV pool: call it with its own keys and "
        "save_kv_cache=False"
    )
