"""Checks of arguments and buffers that every builder shares."""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput


def check_lens(argument: str, lens: torch.Tensor, batch_size: int | None = None) -> int:
    """The batch size. Raises InvalidInput unless lens is int32 [B]."""
    if lens.dtype != torch.int32 or lens.dim() != 1:
        raise InvalidInput(argument, came=_describe(lens), expected="int32 [B]")
    if batch_size is not None and lens.shape[0] != batch_size:
        raise InvalidInput(argument, came=_describe(lens), expected=f"int32 [{batch_size}]")
    return lens.shape[0]


def check_table(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor) -> int:
    """The batch size. Raises InvalidInput unless the table and its row numbers are as said."""
    table = req_to_token
    if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
        raise InvalidInput(
            "req_to_token", came=_describe(table), expected="contiguous int32 [rows, max_context]"
        )
    if req_pool_indices.dtype != torch.int64 or req_pool_indices.dim() != 1:
        raise InvalidInput(
            "req_pool_indices", came=_describe(req_pool_indices), expected="int64 [B]"
        )
    return req_pool_indices.shape[0]


def check_picks(topk_indices: torch.Tensor, num_tokens: int) -> None:
    """Raises InvalidInput unless topk_indices is int32 [num_tokens, topk]."""
    if topk_indices.dtype != torch.int32 or topk_indices.shape[:-1] != (num_tokens,):
        raise InvalidInput(
            "topk_indices",
            came=_describe(topk_indices),
            expected=f"torch.int32 of shape ({num_tokens}, topk)",
        )


def front(
    out: torch.Tensor | None, length: int, like: torch.Tensor, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """The first `length` values of out, or a new vector of the device of `like`.

    Raises InvalidInput for a buffer of another dtype or one that is too short.
    """
    if out is None:
        return torch.empty(length, dtype=dtype, device=like.device)
    if out.dtype != dtype or out.dim() != 1 or out.shape[0] < length:
        raise InvalidInput(
            "out", came=_describe(out), expected=f"{dtype} of at least {length} values"
        )
    return out[:length]


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
