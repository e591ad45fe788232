"""The card of FlashAttention 4 (CuTe DSL), for prefill."""

from __future__ import annotations

from typing import Any

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    emulated,
    multiple_of,
    one_of,
    versions,
)
from attnmux.nvidia.cards import chunks
from attnmux.nvidia.cards.chunks import with_chunks
from attnmux.nvidia.cards.runs import TORCH, on_h200

_SM100 = versions(">=10.0,<11")
_SM90 = versions(">=9.0,<10")


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("nvidia"),
        # Decode is left to another backend.
        "phase": one_of("extend"),
        "dtype": one_of(dtype),
        "deterministic": ANY,
        "lse": ANY,
        "strided_kv": ANY,
    }
    return Clause(**{**everywhere, **more})


def _mha(dtype: str, head_dim: Condition, v_head_dim: Condition, **machine: Condition) -> Clause:
    return _clause(
        dtype,
        kind=one_of("mha"),
        page_size=one_of(128),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        # The library takes them in bfloat16, which is coarser than float16's tolerance.
        sinks=ANY if dtype == "bfloat16" else NONE,
        logit_cap=ANY,
        **machine,
    )


def _on_sm100(dtype: str) -> tuple[Clause, ...]:
    machine = {"version": _SM100, "kv_dtype": one_of(dtype)}
    latent = _clause(
        dtype,
        kind=one_of("mla"),
        page_size=emulated(1),
        head_dim=ANY,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        **machine,
    )
    return (
        *with_chunks([_mha(dtype, multiple_of(8, most=128), NONE, **machine)]),
        _mha(dtype, one_of(192), one_of(128), **machine),
        latent,
    )


def _on_sm90(dtype: str) -> tuple[Clause, ...]:
    machine = {"version": _SM90, "kv_dtype": one_of(dtype)}
    return (
        *with_chunks([_mha(dtype, multiple_of(8, most=128), NONE, **machine)]),
        _mha(dtype, one_of(192), one_of(128), **machine),
    )


FA4 = BackendCard(
    name="fa4",
    summary="FlashAttention 4 for prefill: MHA with K and V of two dims, and MLA on SM100",
    factory="attnmux.nvidia.fa4:make",
    virtual_requests=True,
    # A pre-release: there is no other.
    requires=("torch>=2.11", "flash-attn-4>=4.0.0b18"),
    extra="fa4",
    # SGLang's manual: not with trtllm_mha's decode, even where both take pages of 128.
    excludes=("trtllm_mha",),
    companions=("flashinfer", "triton"),
    verified_on=(
        on_h200(
            "flash-attn-4 4.0.0b18",
            "nvidia-cutlass-dsl 4.8.0",
            date="2026-11-29",
            torch=TORCH,
            cases=58,
        ),
        Verified(
            on="flash_attn_varlen_func of flash-attn-4 4.0.0b18",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-22",
        ),
    ),
    sources={
        "attention_chunk": chunks.SOURCE,
        "version": (
            "the library's kernels for SM80 and SM120 take no pages; those for SM90 take no "
            "latents and do not split keys"
        ),
        "dtype": "flash_attn.cute: fp16 and bf16",
        "kv_dtype": (
            "SGLang's manual: no e4m3; no pool here stores the 4 bits that it lists for SM100"
        ),
        "page_size": (
            "a page is a tile of the kernel, which TMA loads whole; on SM90 other pages need a "
            "tile of 128 keys and dims that are multiples of 16; over a latent, SGLang's manual "
            "has 1, which tables of single tokens give for any page size"
        ),
        "head_dim": (
            "flash_attn.cute, SM100: multiples of 8 up to 128, and DeepSeek's 192; SM90 has tiles "
            "of 128 keys for these only"
        ),
        "v_head_dim": "as head_dim: 128 for K of 192",
        "kv_lora_rank": "flash_attn.cute's `qv`: 512 and 64",
        "qk_rope_head_dim": "as kv_lora_rank",
    },
    clauses=tuple(
        clause
        for on in (_on_sm100, _on_sm90)
        for dtype in ("bfloat16", "float16")
        for clause in on(dtype)
    ),
    priors=(
        Prior(
            rank=40,
            when=Clause.when(version=_SM90),
            source="not measured on SM90: after fa3, flashinfer and triton",
        ),
        Prior(
            rank=26,
            when=Clause.when(v_head_dim=NONE),
            source="SGLang 0.5.23 takes trtllm_mha where K and V have one dim",
        ),
        Prior(
            rank=22,
            source="SGLang 0.5.23's default on SM100 where K and V have different dims",
        ),
    ),
)
