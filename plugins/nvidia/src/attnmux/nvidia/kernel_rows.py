"""Common requirements of several libraries on layers and pools, and the layout of their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

from attnmux.core import InvalidInput, torch_dtype
from attnmux.core.plugin import LatentRows

if TYPE_CHECKING:
    from attnmux.core import BackendContext, LayerSpec


FP8 = torch.float8_e4m3fn
"""The only 8-bit float that most of the kernels read."""


def latent_layers(context: BackendContext) -> tuple[LayerSpec, ...]:
    """The context's layers of MLA, at least one. `LatentRows.check` accepts all of them.

    The others belong to the expanded prefill, which decoding never calls.
    Raises InvalidInput if there is none, and for dims without a kernel.
    """
    layers = tuple(layer for layer in context.layers if layer.kind == "mla")
    if not layers:
        kinds = sorted({layer.kind for layer in context.layers})
        raise InvalidInput("layers", got=f"those of {kinds}", expected="one of mla or more")
    for layer in layers:
        LatentRows.check(layer)
    return layers


def check_own_or_fp8(context: BackendContext) -> None:
    """Raises InvalidInput for a pool that is neither of the queries' dtype nor of e4m3."""
    dtype, wanted = context.token_to_kv_pool.dtype, context.request.dtype
    if dtype != FP8 and wanted is not None and dtype != torch_dtype(wanted):
        raise InvalidInput(
            "token_to_kv_pool", got=dtype, expected=f"{wanted}, as the queries are, or {FP8}"
        )


def check_bfloat16_or_fp8(context: BackendContext) -> None:
    """Raises InvalidInput for a pool of any other dtype."""
    dtype = context.token_to_kv_pool.dtype
    if dtype not in (torch.bfloat16, FP8):
        raise InvalidInput("token_to_kv_pool", got=dtype, expected=f"{torch.bfloat16} or {FP8}")


@overload
def by_request(rows: torch.Tensor, each: int) -> torch.Tensor: ...
@overload
def by_request(rows: torch.Tensor | None, each: int) -> torch.Tensor | None: ...
def by_request(rows: torch.Tensor | None, each: int) -> torch.Tensor | None:
    """[B, each, H, D], a view of rows [T, H, D] of requests with `each` tokens; None of None."""
    if rows is None:
        return None
    return rows.unsqueeze(1) if each == 1 else rows.view(-1, each, *rows.shape[1:])


def store_lse(source: torch.Tensor, lse: torch.Tensor, queries_each: int | None) -> None:
    """Copy the kernels' LSE, a natural logarithm, to the caller's [T, Hq].

    source: [Hq, T], or [B, Hq, Tq] if every request has `queries_each` queries.
    """
    if queries_each is None:
        lse.copy_(source.t())
    else:
        lse.view(source.shape[0], queries_each, -1).copy_(source.transpose(1, 2))
