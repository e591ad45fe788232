"""The card of FlashAttention 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Condition,
    ErrorBound,
    Option,
    Prior,
    at_most,
    one_of,
    runtimes,
    versions,
)
from attnmux.nvidia.cards.runs import TORCH, on_h200

NUM_SPLITS = Option(
    name="num_splits",
    type=int,
    default=0,
    least=0,
    most=256,
    summary="parts that the keys of a request are split into; 0 lets the library choose",
)
REQUIRES = (
    "torch>=2.11",
    # In the order of `fa3/providers.PROVIDERS`. Before 0.4, under the name sgl-kernel, the
    # functions had no `out`; vLLM before 0.32 was not tried.
    ("sglang-kernel>=0.4.5", "flash-attn-3", "vllm>=0.32"),
)
"""Any of the packages with FlashAttention 3. vLLM's build lacks attention chunks, and sinks over V
of other dims than K; FlashAttention's own lacks sinks. A layer that needs them makes the backend
fail when it is made, and the next package or candidate serves."""
TREE_SOURCES = {
    "page_size": (
        "a tree is a call over the prefix and one over each draft's own ancestors, whose table "
        "names single tokens"
    ),
    "spec_topk": (
        "as page_size: a chain is causal over pages of any size. The kernels take no mask, so a "
        "tree's mask may hide only drafts: all of them see the whole prefix. With debug set in "
        "the context, other masks are refused"
    ),
}
"""The sources of draft trees, for `fa3` and `fa3_mla`."""
PADDED = one_of(80, 112, 160)
"""Head dims of models that run on kernels for the next larger one."""


def _clauses(
    dtype: str, head_dim: Condition, v_head_dim: Condition, *stored: str
) -> Iterator[Clause]:
    """For queries of one dtype. stored: the dtypes of K and V."""
    everywhere: dict[str, Any] = {
        "vendor": one_of("nvidia"),
        "version": versions(">=9.0,<10"),
        "runtime": runtimes("cuda>=12.3"),
        "kind": one_of("mha"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(*stored),
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "logit_cap": ANY,
        "deterministic": ANY,
        "graph": ANY,
        "lse": ANY,
        "strided_kv": ANY,
    }
    causal: dict[str, Any] = {
        **everywhere,
        "phase": one_of("extend", "decode", "verify", "draft", "encoder"),
        "page_size": ANY,
        "spec_topk": one_of(1),
        "sliding_window": ANY,
        "attention_chunk": ANY,
        "cross_attention": ANY,
    }
    yield Clause(**causal)
    if dtype == "bfloat16":
        # Sinks are rounded to it, which is coarser than float16's tolerance.
        yield Clause(**causal, sinks=ANY, num_q_heads=at_most(64))
    tree: dict[str, Any] = {**everywhere, "page_size": one_of(1), "spec_topk": ANY}
    yield Clause(**tree, phase=one_of("extend", "decode", "verify", "draft"))
    yield Clause(**tree, phase=one_of("verify"), custom_mask=ANY)


FA3 = BackendCard(
    name="fa3",
    summary="FlashAttention 3 on Hopper: paged KV of any page size, windows, sinks, FP8, graphs",
    factory="attnmux.nvidia.fa3.backend:make",
    tree_masks=BackendCard.TREE_MASKS,
    requires=REQUIRES,
    extra="fa3",
    # Over e4m3 K and V, queries and weights are rounded to e4m3 as well.
    fp8_products=True,
    error_bounds=(
        ErrorBound(
            max_error=1, keys=131072, kv_dtype=one_of("bfloat16"), source="0.74 on an H200, D 128"
        ),
        ErrorBound(
            max_error=16, keys=131072, kv_dtype=one_of("fp8_e4m3"), source="12.3 on an H200, D 128"
        ),
    ),
    options=(NUM_SPLITS,),
    verified_on=(on_h200("sglang-kernel 0.4.10", date="2026-11-29", torch=TORCH, cases=1022),),
    sources={
        "version": "the library is built for SM80 to SM89 too; the backend was run on SM90 only",
        "runtime": "sgl_kernel.flash_attn.is_fa3_supported",
        "dtype": "flash_api.cpp: fp16, bf16, or all in e4m3",
        "kv_dtype": "flash_api.cpp: K and V in the dtype of Q, or all in e4m3; no e5m2",
        "head_dim": (
            "built for 64, 96, 128, 192 and 256; flash_api.cpp takes any multiple of 8 up to 256 "
            "and rounds it up to one of these. Those that models have, without e4m3"
        ),
        "v_head_dim": "flash_api.cpp, two dims: 128 < D <= 192 with 96 < Dv <= 128",
        "num_q_heads": "mainloop_fwd_sm90_tma_gmma_ws.hpp: an array of 64 sinks",
        **TREE_SOURCES,
    },
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for head_dim, v_head_dim, *stored in (
            (one_of(128, 64, 96, 192, 256), NONE, dtype, "fp8_e4m3"),
            (one_of(192), one_of(128), dtype, "fp8_e4m3"),
            (PADDED, NONE, dtype),
        )
        for clause in _clauses(dtype, head_dim, v_head_dim, *stored)
    ),
    priors=(
        Prior(
            rank=10,
            when=Clause.when(spec_topk=NONE),
            source="H200, bf16: the fastest kernel of most decode and extend workloads tried",
        ),
        Prior(
            rank=10,
            when=Clause.when(spec_topk=one_of(1), page_size=one_of(1)),
            source="as without speculation: a chain of drafts is causal",
        ),
        Prior(rank=30, source="speculation over larger pages goes to flashinfer first"),
    ),
)
