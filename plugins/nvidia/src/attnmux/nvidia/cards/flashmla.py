"""The card of FlashMLA's dense decode kernels."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    at_most,
    one_of,
    versions,
)
from attnmux.nvidia.cards.runs import TORCH, on_h200


def _clause(dtype: str, kv_dtype: str, drafts: Condition) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=versions(">=9.0,<10"),
        # Verify is decode with a fixed number of tokens a request; prefill is the companion's.
        phase=one_of("decode", "verify", "draft"),
        kind=one_of("mla"),
        dtype=one_of(dtype),
        kv_dtype=one_of(kv_dtype),
        page_size=one_of(64),
        head_dim=ANY,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
        spec_draft_tokens=drafts,
        graph=ANY,
        lse=ANY,
        strided_kv=ANY,
    )


FLASHMLA = BackendCard(
    name="flashmla",
    summary="FlashMLA's decode over pages of 64 tokens, in bf16, fp16 or e4m3; SM90",
    factory="attnmux.nvidia.latent.flashmla:make",
    requires=("torch>=2.11", ("sgl-flash-mla>=1.0.0", "sglang-kernel>=0.4.5", "vllm>=0.32")),
    extra="flashmla",
    companions=("flashinfer_mla",),
    # Over e4m3 rows, queries and weights are rounded to e4m3 as well.
    fp8_products=True,
    verified_on=(on_h200("sgl-flash-mla 1.0.0", date="2026-11-29", torch=TORCH, cases=22),),
    sources={
        "version": "only SM90a has dense decode; on SM100 the library has sparse kernels",
        "dtype": "dense_decode.h: fp16 and bf16",
        "kv_dtype": (
            "dense_decode.h: Q and cache in one dtype; dense_fp8_python_api.cpp: both in e4m3, "
            "with a factor each for all of Q and all of the cache"
        ),
        "page_size": "dense_decode.h: page_block_size must be 64",
        "kv_lora_rank": "`head_dim_v` is 512 of the cache's 576",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "causal over the step's tokens, without a mask",
        "spec_draft_tokens": (
            "over e4m3: flash_fwd_mla_kernel.h hides later keys for 66 queries at most, and the "
            "schedule has room for 64 rows of queries and heads a multiprocessor, which is 39 "
            "queries of 128 heads on the 78 of an H20"
        ),
    },
    clauses=tuple(
        _clause(dtype, kv_dtype, drafts)
        for dtype in ("bfloat16", "float16")
        for kv_dtype, drafts in ((dtype, ANY), ("fp8_e4m3", at_most(32)))
    ),
    priors=(
        Prior(
            rank=32,
            source="SGLang 0.5.23 takes it only by name: it needs a companion and pages of 64; on "
            "an H200 it is the fastest for 128 heads",
        ),
    ),
)
