"""flashinfer 0.7.2's decode over paged KV by TensorRT-LLM's kernels: XQA of SM90, trtllm-gen.

XQA takes no strides of Q, output, tables and mask. One scale serves K and V, and only where they
are 8-bit floats; products are then made in 8 bits. The row of a request without keys is 0 divided
by 0, or by its sink; in 8 bits it is not written. In a step of several queries a request, a mask
says which of them each sees, a window skips only whole tiles, and a row gets the sink of its place
in its block. trtllm-gen takes the strides of Q and is causal from the end; it has kernels for Q of
the dtype of K and V. Both expect counters of 0 and leave them so.
"""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import attend
from attnmux.emulators.nvidia.flashinfer.arguments import refuse, refuse_unusual
from attnmux.emulators.nvidia.flashinfer.trtllm_memory import (
    E4M3,
    e4m3,
    int32,
    paged,
    raw,
    split,
    spoiled,
    visible,
)

TILE = 256
"""Keys that a block of XQA loads at once."""

BLOCK_ROWS = 32
"""Rows, of heads and then tokens, of a block of XQA in a step of several queries a request."""

_BOX = 64
"""Keys that XQA's kernel for 8-bit floats loads at once, or a page of fewer."""

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    q_cu_seq_lens: object = None,
) -> torch.Tensor:
    refuse_unusual((q_cu_seq_lens, None))
    refuse(kv_cache_sf, None if o_scale == 1 else o_scale)
    k_cache, v_cache = split(kv_cache, kv_layout)
    each = q_len_per_req or 1
    # `view` refuses strided queries of several tokens; those of one are misread.
    batch_size = query.shape[0] // each
    heads, head_dim = query.shape[1:]
    _check_xqa(query, k_cache, v_cache, heads, each)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert out.dtype == query.dtype, "Output and query must have the same dtype"
    assert each == 1 or mask is not None, "Mask is required for speculative decoding"
    is_fp8 = k_cache.dtype == E4M3
    kv_scale = float(bmm2_scale)
    q_scale = float(bmm1_scale) / kv_scale
    q = raw(query).view(batch_size, each, heads, head_dim)
    in_8_bits = is_fp8 and (each == 1 or sinks is None)
    lens, tables = int32("seq_lens", seq_lens), int32("block_tables", block_tables)
    tile = min(k_cache.shape[1], _BOX) if in_8_bits else 1
    keys, there = paged(k_cache, tables, lens, tile=tile)
    values, _ = paged(v_cache, tables, lens, tile=tile)
    keep = _xqa_visible(there, lens, each, window_left + 1 if window_left >= 0 else 0, mask)
    result, lse = attend(
        e4m3(q) if in_8_bits else q,
        keys,
        values * (kv_scale if is_fp8 else 1.0),
        keep,
        scale=q_scale * (kv_scale if is_fp8 else 1.0),
        rounded_weights=(E4M3, 448.0) if in_8_bits else None,
    )
    answered = keep
    by_head = sinks_of(sinks)
    if by_head is not None:
        row_sinks = by_head.gather(0, _sink_places(each, heads, k_cache.shape[2]))
        result = result * torch.sigmoid(lse - row_sinks.view(each, heads)).unsqueeze(-1)
        answered = keep if in_8_bits else torch.ones_like(keep)
    counters = batch_size * k_cache.shape[2] * -(-each * heads // k_cache.shape[2] // BLOCK_ROWS)
    result = spoiled(result, answered, workspace_buffer, counters)
    raw(out).copy_(result.view(out.shape))
    return out


def _check_xqa(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, heads: int, each: int
) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"Invalid dtype: {query.dtype} for XQA")
    if k_cache.shape[1] not in (16, 32, 64, 128):
        raise ValueError(f"Invalid page_size: {k_cache.shape[1]}")
    if query.shape[-1] % 16 or not 16 <= query.shape[-1] <= 256:
        raise ValueError(f"Invalid head_dim: {query.shape[-1]}")
    assert k_cache.dtype == v_cache.dtype, "K and V cache must have the same dtype"
    if k_cache.dtype not in (query.dtype, E4M3) or heads % k_cache.shape[2]:
        raise RuntimeError("an illegal memory access")
    group = heads // k_cache.shape[2]
    if group > BLOCK_ROWS or (each == 1 and 16 < group <= 24 and k_cache.dtype != E4M3):
        raise RuntimeError("Ninja build failed: static assertion failed")


def _sink_places(each: int, heads: int, kv_heads: int) -> torch.Tensor:
    """[each * heads]: the head whose sink a row is given. It is its own in a block's first rows."""
    group = heads // kv_heads
    row = torch.arange(each).view(-1, 1, 1) * group + torch.arange(group)
    own = torch.arange(kv_heads).view(1, -1, 1) * group + row % BLOCK_ROWS % group
    return own.flatten()


def _xqa_visible(
    there: torch.Tensor, lens: torch.Tensor, each: int, window: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B, each, S]. window: keys, 0 for all."""
    key = torch.arange(there.shape[1], device=there.device)
    skipped = (lens - window).clamp(min=0) if window else torch.zeros_like(lens)
    if each == 1:
        return (there & (key >= skipped.unsqueeze(1))).unsqueeze(1)
    assert mask is not None
    if mask.dtype != torch.uint16 or mask.shape != (len(lens), each, -(-each // 32) * 2):
        raise RuntimeError(f"an illegal memory access: a mask {mask.dtype} {tuple(mask.shape)}")
    words = raw(mask).view(torch.int16).long()
    draft = key - (lens - each).unsqueeze(1)
    own = draft.clamp(0, each - 1).unsqueeze(1).expand(-1, each, -1)
    bits = (words.gather(2, own // 16) >> (own % 16)) & 1
    keep = (draft < 0).unsqueeze(1) | (bits == 1)
    first = skipped // TILE * TILE
    return keep & (there & (key >= first.unsqueeze(1))).unsqueeze(1)


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: object = None,
    multi_ctas_kv_counter_buffer: object = None,
    enable_block_sparse_attention: object = False,
    cp_world: object = 1,
    cp_rank: object = 0,
    causal_seqlens_kv_global: object = None,
    bf16q_fp8kv_transform_mode: object = None,
    request_order: object = None,
    request_order_plan: object = None,
) -> torch.Tensor:
    """Decode as on SM100, where "auto" is trtllm-gen."""
    refuse_unusual(
        (bmm1_scale_log2, None),
        (multi_ctas_kv_counter_buffer, None),
        (enable_block_sparse_attention, False),
        (cp_world, 1),
        (cp_rank, 0),
        (causal_seqlens_kv_global, None),
        (bf16q_fp8kv_transform_mode, None),
        (request_order, None),
        (request_order_plan, None),
    )
    refuse(o_sf_scale, o_sf_vec_size, max_q_len, cum_seq_lens_q, kv_cache_sf, lse)
    refuse(skip_softmax_threshold_scale_factor, return_lse or None)
    refuse(None if uses_shared_paged_kv_idx else False)
    if backend not in ("auto", "trtllm-gen"):
        raise KeyError(f"Backend {backend} not supported")
    k_cache, v_cache = split(kv_cache, kv_layout)
    check_gen(query, k_cache, v_cache, block_tables)
    each = q_len_per_req or 1
    out = gen_output(query, out, out_dtype)
    lens, tables = int32("seq_lens", seq_lens), int32("block_tables", block_tables)
    keys, there = paged(k_cache, tables, lens)
    values, _ = paged(v_cache, tables, lens)
    # Keys are shared out among as many blocks as the longest request may need.
    there = there & (torch.arange(there.shape[1], device=there.device) < max_seq_len)
    keep = visible(there, each, torch.full_like(lens, each), lens, window_left)
    result, _ = attend(
        query.view(-1, each, *query.shape[1:]),
        keys,
        values * float(bmm2_scale),
        keep,
        scale=float(bmm1_scale),
        sinks=sinks_of(sinks),
        rounded_weights=(E4M3, 448.0) if query.dtype == E4M3 else None,
    )
    result = spoiled(result, keep, workspace_buffer, len(lens) * query.shape[1])
    raw(out).copy_(result.view(out.shape))
    return out


def check_gen(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor
) -> None:
    """Raises ValueError and RuntimeError for what trtllm-gen has no kernel for."""
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables must be 2D, got ndim={block_tables.dim()}")
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    group = query.shape[1] // kv_heads
    pages = (16, 32, 64, 128) if group > 1 and not group & (group - 1) else (16, 32, 64)
    if (
        not query.dtype == k_cache.dtype == v_cache.dtype
        or head_dim not in (64, 128, 256)
        or page_size not in pages
        or query.stride(-1) != 1
        or k_cache.stride(-1) != 1
    ):
        raise RuntimeError("Missing TRTLLM-GEN kernel")


def gen_output(
    query: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | str | None
) -> torch.Tensor:
    dtype = out_dtype or (query.dtype if out is None else out.dtype)
    if dtype not in (query.dtype, torch.float16, torch.bfloat16):
        raise ValueError(f"Unsupported out_dtype: {dtype}")
    assert isinstance(dtype, torch.dtype)
    if out is None:
        return torch.empty(query.shape, dtype=dtype, device=query.device)
    if out.shape != query.shape or out.dtype != dtype:
        raise ValueError(f"Invalid out: {out.dtype} {tuple(out.shape)}")
    return out


def sinks_of(sinks: torch.Tensor | list[torch.Tensor] | None) -> torch.Tensor | None:
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or sinks.dtype != torch.float32:
        raise RuntimeError("attention_sinks must be a float tensor")
    return raw(sinks)
