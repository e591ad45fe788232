"""What both packages carry: the schedule of a step, and attention by it.

What the real functions do with their arguments, as far as an adapter can notice:

- Q is [B, Sq, Hq, 576] and the cache [pages, 64, 1, 576], of whose rows the first 512 are V. Output
  is [B, Sq, Hq, 512]; LSE is the natural logarithm, float32, [B, Hq, Sq].
- `causal` counts from the end of a request's keys; a single query is never masked.
- Q and the cache are of one dtype. With float8_e4m3fn the output is bfloat16, the softmax's weights
  are rounded to float8_e4m3fn, unscaled, and the descales [1] multiply: Q's and K's the logits, K's
  the output too.
- A query without keys has output 0 and LSE +inf.
- Over float8_e4m3fn a request of length 0 is an error that is not reported: the kernel reads the
  block table before its row, and any page that it finds there. Here every result is NaN then.
- Over float8_e4m3fn the causal mask is applied in the last two pages of a request's keys alone, so
  that the first of more than 66 queries would see later keys. Here every result is NaN then.
- Over float8_e4m3fn more rows of queries and heads than 64 a multiprocessor leave no part to
  schedule, and the device traps. Here the schedule is refused.
- A schedule of other lengths, of other queries or for other dtypes gives wrong results; the library
  checks its shape alone. Here it gives NaN.
- Keys after a request's end do not matter, whatever they hold. The page of a table's first entry
  is read even for length 0.

Shapes are static and nothing is read on the host.
"""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import attend

SM_COUNT = 132
"""SMs of the emulated device, an H200."""
PAGE, DIM, RANK = 64, 576, 512
FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16)
_SCHEDULE = ("tile_scheduler_metadata", "num_splits")
_FP8_MARK = 1 << 20
_MOST_FP8_REQUESTS = 4095
_MOST_FP8_QUERIES = PAGE + 2
"""One more than the keys of a full page and of one that holds a single key."""


def schedule(
    lens: torch.Tensor, num_rows: int, num_heads_k: int, *, is_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys each part takes, [parts, 8], and where the parts of requests begin, [B + 1].

    lens: [B] int32. num_rows: queries times heads of a request.
    The real parts follow from the lengths in another way; these differ with the lengths too.
    Raises RuntimeError for what the library refuses.
    """
    check(lens.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(lens.is_contiguous(), "seqlens_k must be contiguous")
    check(len(lens) > 0, "batch size must be positive")
    if is_fp8:
        check(len(lens) <= _MOST_FP8_REQUESTS, "Assertion params.batch_size < MaxBatchSize failed")
    parts = SM_COUNT // num_heads_k // -(-num_rows // 64)
    if is_fp8:
        check(parts > 0, "CUDA error: Assertion now_idx == batch_size failed")
    order = torch.arange(1, len(lens) + 1, device=lens.device)
    mark = (lens * order).sum() + num_rows + (_FP8_MARK if is_fp8 else 0)
    tiles = mark.int().expand(max(parts, 1), 8).contiguous()
    blocks = (lens + PAGE - 1) // PAGE
    ends = (blocks if is_fp8 else blocks.clamp(min=1)).cumsum(0)
    return tiles, torch.cat([ends.new_zeros(1), ends]).int()


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    lens: torch.Tensor,
    head_dim_v: int,
    made: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    causal: bool,
    descales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the pages, and its LSE. made: a schedule. Descales come with 8-bit floats.

    Raises RuntimeError for what the library refuses.
    """
    is_fp8 = q.dtype == FP8
    _check_operands(q, k_cache, block_table, lens, head_dim_v)
    _, num_queries, num_heads, _ = q.shape
    expected = schedule(lens, num_queries * num_heads, k_cache.shape[2], is_fp8=is_fp8)
    for name, tensor, like in zip(_SCHEDULE, made, expected, strict=True):
        check(tensor.dtype == torch.int32, f"{name} must have dtype int32")
        check(tensor.shape == like.shape, f"{name} must have shape {tuple(like.shape)}")
        check(tensor.is_contiguous(), f"{name} must be contiguous")
    q_factor, k_factor = _factors(descales, q.device) if is_fp8 else (None, None)

    stored = k_cache.view(torch.uint8) if is_fp8 else k_cache
    rows = stored[block_table.long()].flatten(1, 2).view(k_cache.dtype).float()
    key = torch.arange(rows.shape[1], device=q.device)
    in_range = key < lens.unsqueeze(1)
    keep = in_range.unsqueeze(1).expand(-1, num_queries, -1)
    if causal and num_queries > 1:
        query = torch.arange(num_queries, device=q.device)
        last = lens.unsqueeze(1) - num_queries + query
        keep = keep & (key <= last.unsqueeze(2))
    rows = rows.masked_fill(~in_range[..., None, None], 0)
    values = rows[..., :RANK]
    result, lse = attend(
        q.float(),
        rows,
        values if k_factor is None else values * k_factor,
        keep,
        scale=scale if q_factor is None or k_factor is None else scale * q_factor * k_factor,
        rounded_weights=(FP8, 1.0) if is_fp8 else None,
    )
    lse = lse.masked_fill(lse.isneginf(), torch.inf)
    fits = torch.stack([(a == b).all() for a, b in zip(made, expected, strict=True)]).all()
    if is_fp8:
        masked = not causal or num_queries <= _MOST_FP8_QUERIES
        fits = fits & (lens > 0).all() & masked
    result = torch.where(fits, result, torch.nan).to(torch.bfloat16 if is_fp8 else q.dtype)
    return result, torch.where(fits, lse, torch.nan).transpose(1, 2).contiguous()


def _factors(
    descales: tuple[torch.Tensor | None, torch.Tensor | None], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    q_factor, k_factor = descales
    if q_factor is None or k_factor is None:
        raise RuntimeError("descale is required when input dtype is fp8")
    for name, factor in (("descale_q_", q_factor), ("descale_k_", k_factor)):
        check(factor.dtype == torch.float32, f"{name} must have dtype float32")
        check(factor.shape == (1,), f"{name} must have shape (1)")
    return q_factor, k_factor


def _check_operands(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    lens: torch.Tensor,
    head_dim_v: int,
) -> None:
    check(q.dtype in (*_DTYPES, FP8), "q_dtype == torch::kBFloat16 || q_dtype == torch::kHalf")
    check(k_cache.dtype == q.dtype, "query and key must have the same dtype")
    check(lens.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(q.shape[-1] == DIM, "Only head_size_k == 576 is supported")
    check(head_dim_v == RANK, "Only head_size_v == 512 is supported")
    check(k_cache.shape[1] == PAGE, "Currently page_block_size must be 64")
    check(len(q) > 0, "batch size must be positive")
    check(k_cache.shape[2:] == (1, DIM), "kcache must have shape (num_blocks, 64, 1, 576)")
    check(len(block_table) == len(q), "block_table must have shape (batch_size, …)")
    check(lens.shape == (len(q),), "seqlens_k must have shape (batch_size)")
    # The library does not look; a copy by the tensor memory accelerator faults.
    check(q.data_ptr() % 16 == 0, "misaligned address")
    check(all(step * q.itemsize % 16 == 0 for step in q.stride()[:-1]), "misaligned address")


def check(condition: bool, message: str) -> None:
    """Raises RuntimeError with the message, as the library does, unless the condition holds."""
    if not condition:
        raise RuntimeError(message)
