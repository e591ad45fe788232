"""The card of AMD's AITER kernels."""

from __future__ import annotations

from typing import Any

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    at_least,
    emulated,
    multiple_of,
    one_of,
)

_CAPS = at_least(20)


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("amd"),
        "arch": one_of("gfx942", "gfx950"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
    }
    return Clause(**{**everywhere, **more})


def _clauses(dtype: str) -> tuple[Clause, ...]:
    heads: dict[str, Any] = {
        "kind": one_of("mha"),
        "page_size": one_of(64, 16, 32, 128),
        "logit_cap": _CAPS,
    }
    latents: dict[str, Any] = {
        "kind": one_of("mla"),
        "page_size": emulated(1),
        "head_dim": ANY,
        "kv_lora_rank": one_of(512),
        "qk_rope_head_dim": one_of(64),
        "spec_topk": ANY,
        "graph": ANY,
    }
    return (
        _clause(
            dtype,
            phase=one_of("extend", "decode", "verify", "draft"),
            head_dim=one_of(128, 64, 256, 32, 16),
            spec_topk=one_of(1),
            sliding_window=ANY,
            sinks=ANY,
            graph=ANY,
            **heads,
        ),
        _clause(dtype, phase=one_of("encoder"), head_dim=ANY, v_head_dim=ANY, **heads),
        _clause(dtype, phase=one_of("extend", "decode", "verify", "draft"), **latents),
        _clause(dtype, phase=one_of("verify"), custom_mask=ANY, **latents),
    )


AITER = BackendCard(
    name="aiter",
    summary="AMD's AITER: its Triton kernels for MHA and MLA on MI300 and MI350",
    factory="attnmux.amd.aiter:make",
    # `aiter` on PyPI is an unrelated project.
    requires=("torch>=2.11", "amd-aiter>=0.1.7.post2.dev18"),
    extra="aiter",
    verified_on=(
        Verified(
            on="NVIDIA H200",
            platform="nvidia:sm90",
            libraries=("torch 2.11.0+cu130", "triton 3.6.0", "amd-aiter 0.1.7.post2.dev18"),
            date="2026-11-24",
            cases=320,
        ),
    ),
    sources={
        "arch": "AITER's tables of launches are for MI300X and MI350X",
        "dtype": "the dtypes that SGLang 0.5.23's adapter passes on",
        "kv_dtype": "SGLang's manual: no 8-bit and no 4-bit KV",
        "page_size": (
            "`unified_attention`: in decode a page is a tile of its matrix products; latents are "
            "read by slot"
        ),
        "head_dim": (
            "`unified_attention`: with keys split, 0.1.7 compiles for powers of two alone, the "
            "same for K and V"
        ),
        "logit_cap": (
            "`apply_softcap` gives NaN for a logit beyond 88 times its cap, in a padding row too"
        ),
        "kv_lora_rank": "`extend_attention_fwd` cuts rows of 576 into 512 and 64",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "`unified_attention` takes no mask; over latents `extend_attention_fwd` does",
    },
    clauses=tuple(clause for dtype in ("bfloat16", "float16") for clause in _clauses(dtype)),
    priors=(
        Prior(
            rank=10, when=Clause.when(kind=one_of("mha")), source="SGLang 0.5.23's default on AMD"
        ),
        Prior(
            rank=10,
            when=Clause.when(num_q_heads=multiple_of(16, most=128)),
            source="SGLang 0.5.23's default on AMD for MLA with 16 or 128 heads a rank",
        ),
        Prior(rank=60, source="SGLang 0.5.23 takes triton on AMD for other MLA"),
    ),
)
