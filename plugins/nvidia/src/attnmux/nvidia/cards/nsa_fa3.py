"""The card of FlashAttention 3 over the keys that DeepSeek's indexer picks."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Prior,
    Verified,
    emulated,
    one_of,
    runtimes,
    versions,
)
from attnmux.nvidia.cards.fa3 import NUM_SPLITS, REQUIRES
from attnmux.nvidia.cards.runs import TORCH, on_h200

NSA_FA3 = BackendCard(
    name="nsa_fa3",
    summary="DeepSeek-V3.2's sparse MLA by FlashAttention 3 on Hopper: 16 bits, any page size",
    factory="attnmux.nvidia.latent.nsa_fa3:make",
    requires=REQUIRES,
    extra="fa3",
    options=(NUM_SPLITS,),
    verified_on=(
        on_h200("sglang-kernel 0.4.10", date="2026-11-29", torch=TORCH, cases=75),
        Verified(
            on="flash_attn_with_kvcache of sglang-kernel 0.4.5",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-28",
        ),
    ),
    sources={
        "version": "kernels with `qv` are built for SM90 only",
        "runtime": "sgl_kernel.flash_attn.is_fa3_supported",
        "dtype": "flash_api.cpp: fp16 and bf16",
        "kv_dtype": "e4m3 kernels are built for square head dims and 192/128, not for 64/512",
        "page_size": "each token's table names the picked slots as pages of one token",
        "kv_lora_rank": "the instance (64, 512): a rotary part of 64 and a latent of 512",
        "qk_rope_head_dim": "as kv_lora_rank",
    },
    clauses=tuple(
        Clause(
            vendor=one_of("nvidia"),
            version=versions(">=9.0,<10"),
            runtime=runtimes("cuda>=12.3"),
            phase=one_of("extend", "decode"),
            kind=one_of("nsa"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            page_size=emulated(1),
            head_dim=ANY,
            kv_lora_rank=one_of(512),
            qk_rope_head_dim=one_of(64),
            deterministic=ANY,
            graph=ANY,
            lse=ANY,
            strided_kv=ANY,
        )
        for dtype in ("bfloat16", "float16")
    ),
    priors=(
        Prior(
            rank=27,
            source="SGLang 0.5.23 has it among its kernels for sparse MLA; its speed was not "
            "measured here, so it comes after nsa and triton",
        ),
    ),
)
