"""The card of dual chunk attention."""

from __future__ import annotations

from attnmux.core.plugin import ANY, BackendCard, Clause, Prior, one_of, runtimes, versions
from attnmux.nvidia.cards.fa3 import REQUIRES
from attnmux.nvidia.cards.runs import TORCH, on_h200

DUAL_CHUNK_FLASH_ATTN = BackendCard(
    name="dual_chunk_flash_attn",
    # The approximate prefill over a selection of keys is not offered: all keys count.
    summary="Qwen2.5-1M's dual chunk attention: three FlashAttention calls a step, merged by LSE",
    factory="attnmux.nvidia.fa3.dual_chunk:make",
    requires=REQUIRES,
    extra="fa3",
    verified_on=(on_h200("sglang-kernel 0.4.10", date="2026-11-29", torch=TORCH, cases=147),),
    sources={
        "version": "sgl_kernel.flash_attn.is_fa3_supported: SM80 to SM90",
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
            # Tables name slots where chunks are not whole pages.
            page_size=ANY,
            head_dim=one_of(128, 64, 96, 192, 256),
            graph=ANY,
            lse=ANY,
        )
        for dtype in ("bfloat16", "float16")
    ),
    priors=(Prior(rank=10, source="the only backend for this kind of attention"),),
)
