"""The card of the Wave kernels."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Option,
    Prior,
    Verified,
    emulated,
    multiple_of,
    one_of,
)

WAVE = BackendCard(
    name="wave",
    summary="kernels written in Wave and compiled through IREE, for MI300 and MI350",
    factory="attnmux.amd.wave:make",
    requires=("torch>=2.11", "wave-lang>=3.9.1"),
    extra="wave",
    options=(
        Option(
            name="num_kv_splits",
            type=int,
            default=8,
            least=1,
            most=256,
            summary="parts of each request's keys in decode, for which kernels are compiled",
        ),
    ),
    # Emulated only: no part of it has run on an AMD device.
    verified_on=(
        Verified(
            on="the templates of paged decode and extend, wave-lang 3.9.1",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-25",
        ),
    ),
    sources={
        "arch": "the templates use MFMA shapes that gfx942 introduced",
        "dtype": "SGLang 0.5.23 compiles the templates for fp16 and bf16",
        "kv_dtype": "the templates read K and V in the dtype of Q",
        "page_size": "tables hold token slots (block size 1)",
        "head_dim": (
            "whole MFMA tiles; no limit is stated, and SGLang's tests of these kernels go up to "
            "128 in extend (test_wave_attention_kernels.py)"
        ),
    },
    clauses=tuple(
        Clause(
            vendor=one_of("amd"),
            arch=one_of("gfx942", "gfx950"),
            phase=one_of("extend", "decode"),
            kind=one_of("mha"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            page_size=emulated(1),
            head_dim=multiple_of(16, most=128),
            logit_cap=ANY,
            graph=ANY,
        )
        for dtype in ("float16", "bfloat16")
    ),
    priors=(Prior(rank=40, source="SGLang 0.5.23 takes it only by name"),),
)
