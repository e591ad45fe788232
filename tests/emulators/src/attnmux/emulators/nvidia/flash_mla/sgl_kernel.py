"""`sgl_kernel.flash_mla` of sglang-kernel 0.4.5: the schedule comes as two tensors."""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.flash_mla.kernel import decode, schedule


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> list[torch.Tensor]:
    """The schedule: tile_scheduler_metadata [parts, 8] and num_splits [B + 1], int32.

    Raises AssertionError and RuntimeError for what the library refuses, NotImplementedError for
    what it serves and the emulator does not: sparse attention, and a schedule made by the kernel.
    """
    if cache_seqlens is None or topk is not None:
        raise NotImplementedError("the emulator knows dense attention by a schedule alone")
    assert num_q_tokens_per_head_k is not None
    assert num_heads_k is not None
    made = schedule(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, is_fp8=is_fp8_kvcache)
    return list(made)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    kv_format: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a paged cache. Q's dtype says which kernel; `is_fp8_kvcache` is looked at for
    sparse attention and 16-bit Q alone.

    Raises AssertionError and RuntimeError for what the library refuses, NotImplementedError for
    sparse attention.
    """
    assert kv_format is None
    if indices is not None:
        raise NotImplementedError("the emulator knows no sparse attention")
    assert num_splits is not None
    assert block_table is not None
    assert cache_seqlens is not None
    assert attn_sink is None
    assert extra_k_cache is None
    assert extra_indices_in_kvcache is None
    assert topk_length is None
    assert extra_topk_length is None
    assert (descale_q is None) == (descale_k is None)
    if is_fp8_kvcache and q.element_size() != 1:
        raise RuntimeError("Dense FP8 decode is exposed via fwd_kvcache_mla_fp8")
    return decode(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        (tile_scheduler_metadata, num_splits),
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        descales=(descale_q, descale_k),
    )
