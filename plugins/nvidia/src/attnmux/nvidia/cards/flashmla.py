"""The card of FlashMLA's dense decode kernels."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Prior
from attnmux.core.choosing.conditions import ANY, one_of, versions


def _clause(dtype: str) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=versions(">=9.0,<10"),
        # Verify is decode with a fixed number of tokens a request; prefill is the companion's.
        phase=one_of("decode", "verify", "draft"),
        kind=one_of("mla"),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype, "fp8_e4m3"),
        page_size=one_of(64),
        head_dim=ANY,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
        chunked_prefix=ANY,
        graph=ANY,
        lse=ANY,
    )


FLASHMLA = BackendCard(
    name="flashmla",
    summary="FlashMLA's decode over pages of 64 tokens, in bf16, fp16 or e4m3; SM90",
    status="planned",
    requires=("torch>=2.11", ("sgl-flash-mla>=1.0.0", "sglang-kernel>=0.4.5")),
    extra="flashmla",
    companions=("flashinfer_mla",),
    sources={
        "version": "the dense kernels; what the library has for SM100 is sparse",
        "dtype": "`flash_mla_with_kvcache`: fp16 and bf16",
        "kv_dtype": "`flash_mla_with_kvcache`: the dtype of Q, or e4m3 with its scales",
        "page_size": "k_cache [blocks, 64, 1, 576]",
        "kv_lora_rank": "`head_dim_v` is 512 of the cache's 576",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "causal over the step's tokens, without a mask",
    },
    clauses=tuple(map(_clause, ("bfloat16", "float16"))),
    priors=(
        Prior(
            rank=32,
            source="SGLang 0.5.23 takes it only by name: it needs a companion and pages of 64; on "
            "an H200 it is the fastest for 128 heads",
        ),
    ),
)
