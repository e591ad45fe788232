"""Checks of KV pools, and their memory as kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import AttnmuxError, InvalidInput

if TYPE_CHECKING:
    from attnmux.core.context import BackendContext
    from attnmux.core.layer import LayerSpec

FP8 = torch.float8_e4m3fn
"""The only 8-bit float that most of the kernels read."""

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def check_page_size(context: BackendContext, *page_sizes: int) -> None:
    """Raises InvalidInput for a pool of pages of none of the sizes."""
    pool = context.token_to_kv_pool
    if pool.page_size not in page_sizes:
        raise InvalidInput(
            "token_to_kv_pool",
            got=f"pages of {pool.page_size} tokens",
            expected=f"pages of {' or '.join(map(str, page_sizes))}",
        )


def check_sixteen_bits(context: BackendContext) -> None:
    """Raises InvalidInput for a pool of another dtype than the queries' 16-bit one."""
    dtype, asked = context.token_to_kv_pool.dtype, context.request.dtype
    if dtype not in SIXTEEN_BITS or (asked is not None and dtype != torch_dtype(asked)):
        raise InvalidInput(
            "token_to_kv_pool",
            got=dtype,
            expected=f"{asked or 'bfloat16 or float16'}, as the queries are",
        )


def kv_pages(
    layer: LayerSpec, context: BackendContext, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [pages, page_size, Hkv, D] and V [pages, page_size, Hkv, Dv]: views of the pool's buffers.

    page_size: the pool's own, or one that divides it.
    """
    k, v = context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    return k.view(-1, page_size, *k.shape[1:]), v.view(-1, page_size, *v.shape[1:])


def not_in_pool(layer: LayerSpec) -> AttnmuxError:
    """The error of a call that reads keys of a layer that the pool does not store."""
    return AttnmuxError(
        f"layer {layer.layer_id} is not in the KV pool: call it with its own keys and "
        "save_kv_cache=False"
    )
