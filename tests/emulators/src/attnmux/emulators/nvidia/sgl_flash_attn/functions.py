"""The functions, with the library's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attnmux.emulators.nvidia.dense import padded
from attnmux.emulators.nvidia.sgl_flash_attn.attention import (
    Call,
    Queries,
    Result,
    check,
    check_int32,
    check_rows,
    check_splits,
    loaded_of_pages,
    of_pages,
    run,
)
from attnmux.emulators.nvidia.sgl_flash_attn.scheduling import get_scheduler_metadata, is_of_call

MERGED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: Sequence[torch.Tensor] | None = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention over a paged cache [pages, page, Hkv, D], or over [B, S, Hkv, D] without a table.

    Raises RuntimeError for what the library refuses, NotImplementedError for what it serves and
    the emulator does not: appending K and V, `only_qv`, scheduler metadata of packed queries.
    """
    unserved = (k, v, rotary_cos, cache_batch_idx, cache_leftpad, score_mod)
    if any(argument is not None for argument in unserved) or only_qv:
        raise NotImplementedError("the emulator appends no K and V, and knows no only_qv")
    if not isinstance(cache_seqlens, torch.Tensor):
        raise NotImplementedError("the emulator takes a tensor of cache_seqlens")
    check_int32("seqused_k", cache_seqlens)
    check_splits(num_splits)
    keys, values = k_cache, v_cache
    loaded = torch.full_like(cache_seqlens, k_cache.shape[1])
    if page_table is not None:
        check_int32("page_table", page_table)
        check(k_cache.shape[:3] == v_cache.shape[:3], "v must have shape (num_pages, page_size …)")
        check_rows(k_cache)
        check_rows(v_cache)
        keys, values = of_pages(k_cache, page_table), of_pages(v_cache, page_table)
        loaded = loaded_of_pages(cache_seqlens, k_cache.shape[1])
    if cu_seqlens_q is None:
        longest, q_lens = q.shape[1], torch.full_like(cache_seqlens, q.shape[1])
    else:
        check_int32("cu_seqlens_q", cu_seqlens_q)
        check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is")
        longest, q_lens = max_seqlen_q or 0, cu_seqlens_q.diff()
    batch_size = len(q) if cu_seqlens_q is None else len(q_lens)
    check(cache_seqlens.shape == (batch_size,), "seqused_k must have shape (batch_size)")
    call = Call(
        scale=softmax_scale,
        causal=causal,
        window=(window_size[0], window_size[1]),
        chunk=attention_chunk or 0,
        softcap=softcap,
        sinks=sinks,
        descales=(q_descale, k_descale, v_descale),
    )
    queries = Queries(q=q, qv=qv, bounds=cu_seqlens_q, longest=longest, lens=q_lens)
    result = run(call, queries, keys, values, cache_seqlens, loaded, out, return_softmax_lse)
    if scheduler_metadata is not None:
        if cu_seqlens_q is not None:
            raise NotImplementedError("the emulator knows schedules of batched queries alone")
        own = get_scheduler_metadata(
            len(q),
            longest,
            keys.shape[1],
            q.shape[-2],
            keys.shape[2],
            q.shape[-1],
            cache_seqlens,
            qkv_dtype=q.dtype,
            headdim_v=values.shape[-1],
            page_size=None if page_table is None else k_cache.shape[1],
            causal=causal,
            window_size=window_size,
            attention_chunk=attention_chunk or 0,
            has_softcap=softcap > 0,
            num_splits=num_splits,
        )
        attended = result if isinstance(result, torch.Tensor) else result[0]
        attended.masked_fill_(~is_of_call(scheduler_metadata, own), torch.nan)
    return result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: Sequence[torch.Tensor] | None = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention over packed keys [total_k, Hkv, D]; `page_table` is ignored.

    Raises RuntimeError and ValueError for what the library refuses, NotImplementedError for what
    it serves and the emulator does not.
    """
    if any(argument is not None for argument in (seqused_q, seqused_k, score_mod)) or only_qv:
        raise NotImplementedError("the emulator knows no seqused and no only_qv")
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("max_seqlen_q and max_seqlen_k are required for FA3")
    check_int32("cu_seqlens_q", cu_seqlens_q)
    check_int32("cu_seqlens_k", cu_seqlens_k)
    check(cu_seqlens_k.shape == cu_seqlens_q.shape, "cu_seqlens_k must have shape (batch_size+1)")
    check_rows(k)
    check_rows(v)
    check_splits(num_splits)
    call = Call(
        scale=softmax_scale,
        causal=causal,
        window=(window_size[0], window_size[1]),
        chunk=attention_chunk or 0,
        softcap=softcap,
        sinks=sinks,
        descales=(q_descale, k_descale, v_descale),
    )
    keys, values = (padded(packed, cu_seqlens_k, max_seqlen_k) for packed in (k, v))
    queries = Queries(
        q=q, qv=qv, bounds=cu_seqlens_q, longest=max_seqlen_q, lens=cu_seqlens_q.diff()
    )
    kv_lens = cu_seqlens_k.diff()
    loaded = torch.full_like(kv_lens, keys.shape[1])
    return run(call, queries, keys, values, kv_lens, loaded, out, return_softmax_lse)


def merge_state_v2(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v_merged: torch.Tensor | None = None,
    s_merged: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, D] and natural-logarithm LSE [T, H] of two sets of keys, as those of both.

    Of an LSE of -inf or +inf nothing is taken; where both are, the result is NaN.
    Raises RuntimeError for what is not contiguous, which the library reads as if it were.
    """
    v_merged = torch.empty_like(v_a) if v_merged is None else v_merged
    s_a, s_b = s_a.float(), s_b.float()
    s_merged = torch.empty_like(s_a) if s_merged is None else s_merged
    for operand in (v_a, v_b, v_merged, s_a, s_b, s_merged):
        check(operand.is_contiguous(), "input must be contiguous")
    check(v_a.shape == v_b.shape == v_merged.shape, "states must have one shape")
    check(v_merged.dtype in MERGED_DTYPES, f"Unsupported data type of O: {v_merged.dtype}")
    check(v_a.dtype == v_b.dtype == v_merged.dtype, "states are read as of the result's dtype")
    check(s_a.shape == s_b.shape == s_merged.shape == v_a.shape[:2], "LSE must be [T, H]")
    check(v_a.shape[-1] * v_a.itemsize % 16 == 0, "headsize must be multiple of pack_size")
    of_a, of_b = (lse.double().masked_fill(lse.isinf(), -torch.inf) for lse in (s_a, s_b))
    top = torch.maximum(of_a, of_b)
    weight_a, weight_b = (of_a - top).exp(), (of_b - top).exp()
    total = weight_a + weight_b
    share_a, share_b = ((weight / total).unsqueeze(-1) for weight in (weight_a, weight_b))
    merged, lse = v_a.double() * share_a + v_b.double() * share_b, total.log() + top
    return v_merged.copy_(merged), s_merged.copy_(lse)
