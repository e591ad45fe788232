"""The card of dual chunk attention."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Prior
from attnmux.core.choosing.conditions import ANY, one_of, runtimes, versions

DUAL_CHUNK_FLASH_ATTN = BackendCard(
    name="dual_chunk_flash_attn",
    summary="Qwen2.5-1M's dual chunk attention: three FlashAttention calls a step, merged by LSE",
    status="planned",
    # Later releases have no `sparse_attn_func`.
    requires=("torch>=2.11", "sgl-kernel==0.3.21"),
    extra="dual-chunk",
    sources={
        "version": "`flash_attn_with_kvcache` of sgl-kernel 0.3.21, and its `sparse_attn_func`",
        "runtime": "sgl_kernel.flash_attn.is_fa3_supported",
        "dtype": "FlashAttention's 16-bit dtypes",
        "kv_dtype": "SGLang's manual: no 8-bit KV",
        "head_dim": "FlashAttention 3's instances",
    },
    clauses=tuple(
        Clause(
            vendor=one_of("nvidia"),
            version=versions(">=8.0,<10"),
            runtime=runtimes("cuda>=12.3"),
            phase=one_of("extend", "decode"),
            kind=one_of("dual_chunk"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            # Chunks are whole pages: 8192 - 1024 tokens is a multiple of any page in use.
            page_size=ANY,
            head_dim=one_of(128, 64, 96, 192, 256),
            graph=ANY,
        )
        for dtype in ("bfloat16", "float16")
    ),
    priors=(Prior(rank=10, source="the only backend for this kind of attention"),),
)
