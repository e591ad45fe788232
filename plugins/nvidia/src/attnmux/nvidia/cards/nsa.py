"""The card of DeepSeek's sparse attention."""

from __future__ import annotations

from attnmux.core.plugin import ANY, BackendCard, Clause, Prior, Verified, at_most, one_of, versions
from attnmux.nvidia.cards.runs import TORCH, on_h200

NSA = BackendCard(
    name="nsa",
    aliases=("dsa",),
    summary="DeepSeek-V3.2's sparse MLA: an indexer picks 2048 tokens, FlashMLA reads those",
    factory="attnmux.nvidia.latent.nsa:make",
    requires=("torch>=2.11", ("sgl-flash-mla>=1.0.0", "sglang-kernel>=0.4.5", "vllm>=0.32")),
    extra="flashmla",
    verified_on=(
        on_h200("sgl-flash-mla 1.0.0", date="2026-11-29", torch=TORCH, cases=26),
        Verified(
            on="flash_mla_sparse_fwd of sglang-kernel 0.4.5 and sgl-flash-mla 1.0.0",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-22",
        ),
    ),
    sources={
        "version": "`flash_mla_sparse_fwd` is built for SM90 and SM100",
        "dtype": "`flash_mla_sparse_fwd`: Q in bf16",
        "kv_dtype": (
            "`flash_mla_sparse_fwd`: rows in bf16; those of e4m3 are widened before each call, 64 "
            "tokens' picks at a time, since the kernel for e4m3 reads rows of 656 bytes: 512 "
            "values, 4 scales, 64 bf16 of rope"
        ),
        "page_size": "the FP8 kernel reads blocks of 64; SGLang 0.5.23 takes 64 on NVIDIA",
        "num_q_heads": "csrc/api/sparse_prefill.cpp: 64 or 128; fewer are padded",
        "kv_lora_rank": "`flash_mla_sparse_fwd`: rows of 576, d_v = 512",
        "qk_rope_head_dim": "as kv_lora_rank",
    },
    clauses=tuple(
        Clause(
            vendor=one_of("nvidia"),
            version=versions(version),
            phase=one_of("extend", "decode"),
            kind=one_of("nsa"),
            dtype=one_of("bfloat16"),
            kv_dtype=one_of("bfloat16", "fp8_e4m3"),
            page_size=one_of(64),
            head_dim=ANY,
            num_q_heads=at_most(128),
            kv_lora_rank=one_of(512),
            qk_rope_head_dim=one_of(64),
            graph=ANY,
            lse=ANY,
        )
        for version in (">=9.0,<10", ">=10.0,<11")
    ),
    priors=(Prior(rank=10, source="a kernel of the hardware's own; triton's is portable"),),
)
