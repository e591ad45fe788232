"""Stands for the vendor's closed kernel library: one function, with conventions of its own."""

from __future__ import annotations

import math

import torch

HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 64)
MAX_GROUP_SIZE = 16
"""Query heads per KV head."""


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_queries: torch.Tensor,
    max_queries: int,
    *,
    scale: float,
    window: int = 0,
    k_descale: float = 1.0,
    v_descale: float = 1.0,
    keys_per_step: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention; the queries of a request are the last of its tokens.

    q: [T, Hq, D]. k_pages, v_pages: [pages, page_size, Hkv, D]. block_table: [B, width] int32.
    kv_lens: [B] int32. cu_queries: [B + 1] int32, where each request's queries begin.
    max_queries: most queries a request. window: keys that a query sees, its own included; 0 is all.
    Returns out [T, Hq, D] and the base-2 logarithm of the softmax's denominator, [Hq, T] float32.
    A query without keys gives 0 and -inf. Nothing is read on the host.
    Raises ValueError for sizes that no kernel was built for.
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    _check_built(head_dim, page_size, num_heads // num_kv_heads)
    begins, counts = cu_queries[:-1, None], cu_queries.diff()[:, None]
    order = torch.arange(max_queries, device=q.device)
    rows = (begins + order).clamp(max=num_tokens - 1)
    queries = q[rows].float() * scale
    queries = queries.view(*rows.shape, num_kv_heads, -1, head_dim)
    positions = (kv_lens[:, None] - counts + order)[..., None]

    shape = (len(kv_lens), num_kv_heads, num_heads // num_kv_heads, max_queries)
    peak = q.new_full(shape, -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(peak)
    sums = total.new_zeros((*shape, head_dim))
    pages_per_step = max(keys_per_step // page_size, 1)
    for column in range(0, block_table.shape[1], pages_per_step):
        pages = block_table[:, column : column + pages_per_step].long()
        keys = k_pages[pages].flatten(1, 2).float() * k_descale
        values = v_pages[pages].flatten(1, 2).float() * v_descale
        places = torch.arange(keys.shape[1], device=q.device) + column * page_size
        exists = places < kv_lens[:, None]
        seen = (places <= positions) & exists[:, None]
        if window:
            seen &= places > positions - window
        logits = torch.einsum("bqhgd,bkhd->bhgqk", queries, keys)
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        top = torch.maximum(peak, logits.amax(-1))
        base = top.masked_fill(top == -torch.inf, 0)
        weights, decay = (logits - base[..., None]).exp(), (peak - base).exp()
        values = values.where(exists[..., None, None], 0)
        total = total * decay + weights.sum(-1)
        sums = sums * decay[..., None] + torch.einsum("bhgqk,bkhd->bhgqd", weights, values)
        peak = top

    out = sums / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    log2_sums = (peak + total.log()) / math.log(2)
    tokens = torch.arange(num_tokens, device=q.device, dtype=torch.int32)
    request = torch.searchsorted(cu_queries[1:], tokens, right=True).clamp(max=len(kv_lens) - 1)
    place = (tokens - cu_queries[request]).clamp(max=max_queries - 1)
    out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)[request, place]
    return out.to(q.dtype), log2_sums.flatten(1, 2).transpose(1, 2)[request, place].t()


def _check_built(head_dim: int, page_size: int, group_size: int) -> None:
    if head_dim not in HEAD_DIMS or page_size not in PAGE_SIZES or group_size > MAX_GROUP_SIZE:
        raise ValueError(
            f"no kernel for head dim {head_dim}, page size {page_size}, group size {group_size}"
        )
