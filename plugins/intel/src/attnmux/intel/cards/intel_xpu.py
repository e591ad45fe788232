"""The card of Intel's GPU kernels."""

from __future__ import annotations

from typing import Any

from attnmux.core import ANY, BackendCard, Clause, Condition, Prior, at_most, one_of, versions


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("intel"),
        "version": versions(">=2"),
        "phase": one_of("extend", "decode"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
        "deterministic": ANY,
        "graph": ANY,
    }
    return Clause(**{**everywhere, **more})


def _mha(dtype: str, head_dim: Condition, **more: Condition) -> Clause:
    return _clause(
        dtype,
        kind=one_of("mha"),
        page_size=one_of(128, 64),
        head_dim=head_dim,
        group_size=at_most(16),
        sliding_window=ANY,
        logit_cap=ANY,
        lse=ANY,
        **more,
    )


INTEL_XPU = BackendCard(
    name="intel_xpu",
    summary="SYCL FlashAttention kernels for Intel GPUs, MHA and MLA",
    status="planned",
    requires=("torch>=2.11", "sglang-kernel-xpu"),
    sources={
        "version": "XMX units as Xe2 has them",
        "dtype": "sgl-kernel-xpu's flash_attn_with_kvcache: fp16 and bf16",
        "kv_dtype": "SGLang's manual: no 8-bit KV, although the kernel takes its scales",
        "page_size": (
            "decode is built for pages of 64 and 128 tokens; SGLang 0.5.23 also lets 16 and 32 be "
            "over a latent"
        ),
        "head_dim": "sgl-kernel-xpu's instances; sinks are built for 64 alone",
        "group_size": "sgl-kernel-xpu's decode: at most 16 query heads a KV head",
        "kv_lora_rank": "flash_mla_decode: rows of 512 and 64",
        "qk_rope_head_dim": "as kv_lora_rank",
    },
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for clause in (
            _mha(dtype, one_of(128, 64, 96, 192, 256, 512)),
            _mha(dtype, one_of(64), sinks=ANY),
            _clause(
                dtype,
                kind=one_of("mla"),
                page_size=one_of(128, 64, 32, 16),
                head_dim=ANY,
                kv_lora_rank=one_of(512),
                qk_rope_head_dim=one_of(64),
            ),
        )
    ),
    priors=(Prior(rank=10, source="made for the hardware; SGLang 0.5.23 takes triton unasked"),),
)
