"""The card of FlashAttention 3 over a latent cache (MLA)."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Condition,
    Prior,
    one_of,
    runtimes,
    versions,
)
from attnmux.nvidia.cards.fa3 import NUM_SPLITS, REQUIRES, TREE_SOURCES
from attnmux.nvidia.cards.runs import TORCH, on_h200

_PHASES = one_of("extend", "decode", "verify", "draft")


def _clause(
    dtype: str,
    spec_topk: Condition,
    page_size: Condition,
    *,
    phase: Condition = _PHASES,
    custom_mask: Condition = NONE,
) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=versions(">=9.0,<10"),
        runtime=runtimes("cuda>=12.3"),
        phase=phase,
        kind=one_of("mla"),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype),
        page_size=page_size,
        head_dim=ANY,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=spec_topk,
        custom_mask=custom_mask,
        deterministic=ANY,
        graph=ANY,
        lse=ANY,
        strided_kv=ANY,
    )


FA3_MLA = BackendCard(
    name="fa3_mla",
    # Users know both under one name; the request's kind tells the cards apart.
    aliases=("fa3",),
    summary="FlashAttention 3 on Hopper over MLA's latent: any page size, trees at page 1, graphs",
    factory="attnmux.nvidia.fa3.mla:make",
    tree_masks=BackendCard.TREE_MASKS,
    requires=REQUIRES,
    extra="fa3",
    options=(NUM_SPLITS,),
    verified_on=(on_h200("sglang-kernel 0.4.10", date="2026-11-29", torch=TORCH, cases=85),),
    sources={
        "version": "kernels with `qv` are built for SM90 only",
        "runtime": "sgl_kernel.flash_attn.is_fa3_supported",
        "dtype": "flash_api.cpp: fp16 and bf16",
        "kv_dtype": "e4m3 kernels are built for square head dims and 192/128, not for 64/512",
        **TREE_SOURCES,
        "kv_lora_rank": "the instance (64, 512): a rotary part of 64 and a latent of 512",
        "qk_rope_head_dim": "as kv_lora_rank",
    },
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for clause in (
            _clause(dtype, one_of(1), ANY),
            _clause(dtype, ANY, one_of(1)),
            _clause(dtype, ANY, one_of(1), phase=one_of("verify"), custom_mask=ANY),
        )
    ),
    priors=(
        Prior(rank=10, source="SGLang 0.5.23's default for MLA on SM90, with draft trees too"),
    ),
)
