"""What the library asks of its operands, and how it reads some of them."""

from __future__ import annotations

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)

_SMALLEST_BLOCK = 64
"""Keys. Pages of whole blocks can be read without looking at a request's end."""


def of_pages(cache: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """[B, pages * page, Hkv, D] of a paged cache; 8-bit floats are gathered as bytes."""
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return stored[page_table.long()].flatten(1, 2).view(cache.dtype)


def loaded_of_pages(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B]: rows of V that the kernel reads of requests with that many keys."""
    if page_size < _SMALLEST_BLOCK:
        return lens
    return (lens + page_size - 1) // page_size * page_size


def of_heads(
    descale: torch.Tensor | None,
    batch_size: int,
    kv_heads: int,
    device: torch.device,
    *,
    in_use: bool,
) -> torch.Tensor:
    """[B or 1, Hkv or 1]: a descale; other dtypes than FP8 do not look at it."""
    if descale is None or not in_use:
        return torch.ones(1, 1, device=device)
    check(descale.dtype == torch.float32, "expected scalar type Float")
    check(descale.shape == (batch_size, kv_heads), "descale must have shape (batch, num_heads_k)")
    return descale


def check_operands(
    q: torch.Tensor,
    qv: torch.Tensor | None,
    batch_size: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Q and qv as they were given; keys and values [B, S, Hkv, …]."""
    head_dim, v_head_dim = q.shape[-1], values.shape[-1]
    check(q.dtype in _DTYPES, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(keys.dtype == q.dtype, "query and key must have the same dtype")
    check(values.dtype == q.dtype, "query and value must have the same dtype")
    check(keys.shape[0] == batch_size, "batch_size must be equal to batch_size_k")
    check(keys.shape[-1] == head_dim, "k must have the head_size of q")
    check(head_dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(q.shape[-2] % keys.shape[2] == 0, "Number of heads in key/value must divide query's")
    is_fp8 = q.dtype == torch.float8_e4m3fn
    alignment = 16 if is_fp8 else 8
    check(head_dim % alignment == 0, f"head_size should be a multiple of {alignment}")
    check(v_head_dim % alignment == 0, f"head_size_v should be a multiple of {alignment}")
    for operand in (q, keys, values):
        check(operand.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    _check_aligned(q)
    if head_dim != v_head_dim:
        wide = 128 < head_dim <= 192 and 96 < v_head_dim <= 128
        check(wide or (head_dim <= 64 and v_head_dim <= 512), "V headdim is different from Q/K dim")
        check(v_head_dim <= 256 or not is_fp8, "HeaddimV > 256 requires fp16 and bf16 data type")
    if qv is not None:
        check(head_dim <= 64, "q_v is only supported for head_size <= 64")
        check(v_head_dim >= 256, "q_v is only supported for hdim_v >= 256")
        check(qv.dtype == q.dtype, "q_v must have the same dtype as query")
        check(qv.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
        check(qv.shape == (*q.shape[:-1], v_head_dim), "q_v must have the shape of the output")
        _check_aligned(qv)
    if sinks is not None:
        check(sinks.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
        check(sinks.shape == (q.shape[-2],), "sinks must have shape (num_heads)")
        check(sinks.is_contiguous(), "sinks must be contiguous")
        check(len(sinks) <= 64, "the library writes sinks behind the end of an array of 64")


def check_rows(rows: torch.Tensor) -> None:
    """K or V where they lie: rows may be any whole number of loads apart."""
    check(rows.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    _check_aligned(rows)


def check_splits(num_splits: int) -> None:
    check(num_splits <= 256, "num_splits > 256 not supported")


def check_int32(name: str, values: torch.Tensor) -> None:
    check(values.dtype == torch.int32, f"{name} must have dtype torch.int32")
    check(values.stride(-1) == 1, f"{name} must be contiguous")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_aligned(rows: torch.Tensor) -> None:
    """The library does not look; its loads of 16 bytes fault."""
    check(rows.data_ptr() % 16 == 0, "misaligned address")
    check(all(step * rows.itemsize % 16 == 0 for step in rows.stride()[:-1]), "misaligned address")
