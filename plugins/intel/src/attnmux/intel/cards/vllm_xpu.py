"""The card of vLLM's kernels for Intel's GPUs."""

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
    multiple_of,
    one_of,
    versions,
)
from attnmux.intel.vllm_xpu_shapes import PAGE_STEP, SHAPES, Shapes


def _clause(dtype: str, shapes: Shapes, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("intel"),
        "version": versions(">=2,<4"),
        "kind": one_of("mha"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
        "page_size": multiple_of(PAGE_STEP),
        "head_dim": one_of(*shapes.head_dims),
        "group_size": at_most(shapes.most_group),
        **({"sliding_window": ANY} if shapes.windows else {}),
        **({"sinks": ANY} if shapes.sinks else {}),
    }
    return Clause(**{**everywhere, **more})


VLLM_XPU = BackendCard(
    name="vllm_xpu",
    summary="vLLM's SYCL FlashAttention kernels for Intel GPUs, MHA and GQA",
    factory="attnmux.intel.vllm_xpu:make",
    requires=("torch>=2.11", "vllm-xpu-kernels>=0.1.16.2"),
    extra="vllm-xpu",
    # A step leaves out requests without new tokens.
    needs_cpu_seq_lens=True,
    # Emulated only: no part of it has run on an Intel GPU.
    verified_on=(
        Verified(
            on="varlen_fwd below flash_attn_varlen_func of vllm-xpu-kernels 0.1.16.2",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-26",
        ),
    ),
    sources={
        "version": "its error: only Xe2 and Xe3",
        "dtype": "fp16 and bf16; queries of 8 bits are not offered",
        "kv_dtype": "as dtype; the kernels' 8-bit KV is not offered",
        "page_size": (
            "decode kernels for pages that are multiples of 64; those for 16 and 32 serve few dims"
        ),
        "head_dim": "symbols of libattn_kernels_xe_2.so and _xe_3.so: dims with both kernels",
        "group_size": "the same symbols: tiles of 8 or 16 query heads a KV head",
        "spec_topk": "a tree needs a mask, which the function does not take",
    },
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for shapes in SHAPES
        for clause in (
            _clause(dtype, shapes, phase=one_of("extend", "decode"), deterministic=ANY),
            # Equal requests of 2 to 16 queries, as of drafts, ignore `num_splits_kv`.
            _clause(
                dtype,
                shapes,
                phase=one_of("extend", "decode", "verify", "draft"),
                spec_topk=one_of(1),
            ),
        )
    ),
    priors=(Prior(rank=40, source="emulated only; SGLang 0.5.23 has no such backend"),),
)
