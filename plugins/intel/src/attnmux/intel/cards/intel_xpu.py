"""The card of Intel's GPU kernels."""

from __future__ import annotations

from typing import Any

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    at_most,
    one_of,
    versions,
)


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("intel"),
        "version": versions(">=2"),
        "phase": one_of("extend", "decode"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
    }
    return Clause(**{**everywhere, **more})


def _mha(dtype: str, head_dim: Condition, **more: Condition) -> Clause:
    """MHA and GQA. No cap and no LSE: the operator takes both and computes neither."""
    return _clause(
        dtype,
        kind=one_of("mha"),
        page_size=one_of(128, 64),
        head_dim=head_dim,
        group_size=at_most(16),
        sliding_window=ANY,
        # Keys are not split then, so that what a request reads depends on nothing else.
        deterministic=ANY,
        **more,
    )


INTEL_XPU = BackendCard(
    name="intel_xpu",
    summary="SYCL FlashAttention kernels for Intel GPUs, MHA and MLA",
    factory="attnmux.intel.xpu:make",
    # The build for Intel's GPUs, which is on no index, has the name of the one for CUDA, whose
    # versions end before 0.4.
    requires=("torch>=2.11", "sgl-kernel>=0.11"),
    # A step leaves out requests without new tokens.
    needs_cpu_seq_lens=True,
    # Emulated only: no part of it has run on an Intel GPU.
    verified_on=(
        Verified(
            on="fwd, flash_mla_decode and flash_mla_prefill, sgl-kernel-xpu 0.11.0",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-25",
        ),
    ),
    sources={
        "version": "XMX units as Xe2 has them",
        "dtype": "sgl-kernel-xpu's flash_attention.cpp: fp16 and bf16",
        "kv_dtype": "SGLang's manual: no 8-bit KV, although the kernel takes its scales",
        "page_size": (
            "flash_attention.cpp, decode: pages of 64 and 128 tokens; mla_decode.cpp and "
            "mla_prefill.cpp: 16, 32, 64 and 128"
        ),
        "head_dim": "flash_attention.cpp: its list of dims; sinks are built for 64 alone",
        "group_size": "flash_attention.cpp, decode: at most 16 query heads a KV head",
        "num_q_heads": "sgl_kernel/attention.py, flash_mla_decode: at most 128",
        "kv_lora_rank": "sgl_kernel/attention.py, flash_mla_decode: rows of 512 and 64",
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
                num_q_heads=at_most(128),
                kv_lora_rank=one_of(512),
                qk_rope_head_dim=one_of(64),
            ),
        )
    ),
    priors=(Prior(rank=10, source="made for the hardware; SGLang 0.5.23 takes triton unasked"),),
)
