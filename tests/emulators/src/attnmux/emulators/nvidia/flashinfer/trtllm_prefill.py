"""flashinfer 0.7.2's prefill over paged KV by TensorRT-LLM's kernels: trtllm-gen, fmha_v2 of SM90.

fmha_v2 takes no strides. Its paged layouts are one tensor [pages, 2, …]: a table's entry p leads to
K in block 2p and to V in block 2p + 1, counted from K's address; pages are loaded whole. It counts
tiles at the front of its workspace and leaves the count there. A window of 0 hides keys only where
`mask_mode` says so. In float16 it adds up logits and values in float16, the values before they are
divided. Neither kernel writes rows of no request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnmux.emulators.nvidia.dense import attend, padded, unpadded
from attnmux.emulators.nvidia.flashinfer.arguments import refuse, refuse_unusual
from attnmux.emulators.nvidia.flashinfer.trtllm_decode import (
    KVCache,
    check_gen,
    gen_output,
    sinks_of,
)
from attnmux.emulators.nvidia.flashinfer.trtllm_memory import (
    E4M3,
    int32,
    paged,
    raw,
    split,
    visible,
)


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: list[torch.Tensor] | None = None,
    kv_cache_sf: KVCache | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: object = None,
    use_fp16_softmax: object = None,
    uses_spcompress: object = None,
    backend: object = "trtllm-gen",
) -> torch.Tensor:
    """Prefill as on SM100."""
    refuse_unusual(
        (multi_ctas_kv_counter_buffer, None),
        (use_fp16_softmax, None),
        (uses_spcompress, None),
        (backend, "trtllm-gen"),
    )
    refuse(o_sf_scale, o_sf_vec_size, kv_cache_sf, skip_softmax_threshold_scale_factor, lse)
    refuse(return_lse or None, None if uses_shared_paged_kv_idx and causal else False)
    k_cache, v_cache = split(kv_cache, kv_layout)
    check_gen(query, k_cache, v_cache, block_tables)
    out = gen_output(query, out, out_dtype)
    lens = _lens("seq_lens", seq_lens, cum_seq_lens_kv, batch_size)
    _attend_ragged(
        query,
        (k_cache, v_cache),
        int32("block_tables", block_tables),
        lens,
        cum_seq_lens_q,
        out,
        longest=(max_q_len, max_kv_len),
        scales=(float(bmm1_scale), float(bmm2_scale)),
        window_left=window_left,
        sinks=sinks_of(sinks),
    )
    return out


def trtllm_fmha_v2_prefill(
    qkv: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: list[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> torch.Tensor:
    """Prefill in one of the layouts, the paged one that a cache of tokens and then heads has."""
    refuse(pos_encoding_mode, logits_soft_cap_scale, chunked_attention_size or None)
    refuse(save_softmax_stats or None, skip_softmax_threshold_scale_factor or None)
    refuse(None if out_dtype is None and input_layout == "Q_PAGED_KV_NHD" else input_layout)
    query, cache = qkv[0], qkv[1]
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise ValueError(f"{input_layout} expects [pages, 2, page_size, num_kv_heads, head_dim]")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("the FP8 (e4m3) kernels are known to hang on SM90")
    if block_tables is None or block_tables.dim() != 2 or cache.dtype != query.dtype:
        raise RuntimeError("an illegal memory access")
    if cache.shape[-1] not in (64, 128, 256):
        raise NotImplementedError(f"head dim {cache.shape[-1]}")
    assert max_kv_len >= max_q_len, "q seqlen has to be smaller than or equal to the kv seqlen"
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    slides = mask_mode == "sliding_window" or 0 < window_left < max_kv_len
    lens = _lens("seq_lens", seq_lens, cum_seq_lens_kv, batch_size)
    blocks = raw(cache).flatten(0, 1)
    table = int32("block_tables", block_tables) * 2
    _attend_ragged(
        raw(query),
        (blocks, blocks[1:]),
        table,
        lens,
        cum_seq_lens_q,
        out,
        longest=(max_q_len, max_kv_len),
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left if slides else -1,
        sinks=sinks_of(sinks),
        tile=cache.shape[2],
        attend=_attend_in_halves if query.dtype == torch.float16 else attend,
    )
    # The counter of tiles: as many as were drawn.
    workspace_buffer.view(torch.uint8)[:4].view(torch.int32).fill_(1)
    return out


def _lens(name: str, lens: torch.Tensor, bounds: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Lengths by the bounds, which the kernels go by; `lens` says the same."""
    assert len(lens) == batch_size == len(bounds) - 1, f"{name} of {batch_size} requests"
    return int32("cum_seq_lens_kv", bounds).diff()


def _attend_ragged(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    lens: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
    *,
    longest: tuple[int, int],
    scales: tuple[float, float],
    window_left: int,
    sinks: torch.Tensor | None,
    tile: int = 1,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = attend,
) -> None:
    """Write the rows of out that belong to the first max_q_len of a request.

    attend: what does the arithmetic, as `dense.attend`.
    """
    cum_q = int32("cum_seq_lens_q", bounds)
    q_lens = cum_q.diff()
    keys, there = paged(caches[0], tables, lens, tile=tile)
    values, _ = paged(caches[1], tables, lens, tile=tile)
    there = there & (torch.arange(there.shape[1], device=there.device) < longest[1])
    num_queries = min(longest[0], query.shape[0])
    keep = visible(there, num_queries, q_lens, lens, window_left)
    result, _ = attend(
        padded(query, cum_q, num_queries),
        keys,
        values * scales[1],
        keep,
        scale=scales[0],
        sinks=sinks,
        rounded_weights=(E4M3, 448.0) if query.dtype == E4M3 else None,
    )
    result = result.masked_fill(~keep.any(-1)[..., None, None], torch.nan)
    raw(out).copy_(unpadded(result, cum_q, raw(out)))


def _attend_in_halves(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None,
    rounded_weights: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `attend` does, by products of 16 keys that are added up in float16. LSE leaves
    sinks out."""
    batch_size, num_queries, num_heads, width = q.shape
    queries = q.double().reshape(batch_size, num_queries, k.shape[2], -1, width)
    logits = torch.einsum("bqhgd,bshd->bhgqs", queries, k).clamp(-65504, 65504).half().double()
    logits = (logits * scale).masked_fill(~keep[:, None, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(1, k.shape[2], -1, 1) - top.squeeze(-1))
    summed = torch.zeros((*total.shape, v.shape[-1]), dtype=torch.float16, device=q.device)
    for start in range(0, k.shape[1], 16):
        part = weights[..., start : start + 16].half().double()
        more = torch.einsum("bhgqs,bshd->bhgqd", part, v[:, start : start + 16])
        summed = (summed.double() + more).half()
    out = (summed * (1 / total).half().unsqueeze(-1)).float().permute(0, 3, 1, 2, 4).flatten(2, 3)
    lse = (weights.sum(-1).log() + top.squeeze(-1)).float().permute(0, 3, 1, 2)
    return out, lse.reshape(batch_size, num_queries, num_heads)
