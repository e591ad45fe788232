"""The card of TensorRT-LLM's MHA kernels, which flashinfer ships."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    at_most,
    one_of,
    runtimes,
    versions,
)
from attnmux.nvidia.cards import chunks
from attnmux.nvidia.cards.chunks import with_chunks
from attnmux.nvidia.cards.runs import TORCH, on_h200
from attnmux.nvidia.cards.scratch import workspace_bytes

HOPPER = versions(">=9.0,<10")
DATACENTER_BLACKWELL = versions(">=10.0,<11")
DESKTOP_BLACKWELL = versions(">=12.0,<13")
PHASES = ("extend", "decode", "verify", "draft")
PAGES = one_of(64, 32, 16)


def _clause(version: Condition, dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("nvidia"),
        "version": version,
        "runtime": runtimes("cuda>=12.6"),
        "kind": one_of("mha"),
        "dtype": one_of(dtype),
        "page_size": PAGES,
        "head_dim": one_of(128, 64, 256),
        "spec_topk": one_of(1),
        "sliding_window": ANY,
        "sinks": ANY,
        "graph": ANY,
    }
    return Clause(**{**everywhere, **more})


def _clauses(dtype: str) -> Iterator[Clause]:
    wide = one_of(dtype, "fp8_e4m3")
    every = one_of(*PHASES)
    # trtllm-gen, whose kernels for pages of 128 are for grouped heads of a power of two
    yield _clause(DATACENTER_BLACKWELL, dtype, phase=every, kv_dtype=wide)
    yield _clause(
        DATACENTER_BLACKWELL,
        dtype,
        phase=every,
        kv_dtype=wide,
        page_size=one_of(128),
        group_size=one_of(2, 4, 8, 16, 32, 64, 128),
    )
    for version in (HOPPER, DESKTOP_BLACKWELL):
        yield from _tiled(version, dtype, wide)


def _tiled(version: Condition, dtype: str, stored: Condition) -> Iterator[Clause]:
    """XQA for decode and verify, fmha_v2 for the rest."""
    for page_size in (PAGES, one_of(128)):
        paged: dict[str, Any] = {"kv_dtype": stored, "page_size": page_size}
        yield _clause(version, dtype, phase=one_of("decode"), group_size=at_most(16), **paged)
        # Of drafts XQA hides what lies before the last one's window, by whole tiles (mha.cu,
        # `nbTotalSkipTokens`), and a row has the sink of its place in a block of 32.
        drafts: dict[str, Any] = {"phase": one_of("verify"), "sliding_window": NONE, **paged}
        yield _clause(version, dtype, **drafts, group_size=at_most(16), sinks=NONE)
        yield _clause(version, dtype, **drafts, group_size=one_of(1, 2, 4, 8, 16))
    if dtype == "float16":
        return
    # fmha_v2 says of its e4m3 kernels that they hang on SM90; on SM120 it refuses them and windows.
    window = ANY if version is HOPPER else NONE
    yield _clause(
        version,
        dtype,
        phase=one_of("extend", "draft"),
        kv_dtype=one_of(dtype),
        sliding_window=window,
    )


TRTLLM_MHA = BackendCard(
    name="trtllm_mha",
    summary="TensorRT-LLM's MHA through flashinfer: SM100's own kernels, XQA on SM90 and SM120",
    factory="attnmux.nvidia.trtllm_mha:make",
    virtual_requests=True,
    requires=("torch>=2.11", "flashinfer-python>=0.6.13"),
    extra="flashinfer",
    # Over e4m3 K and V, XQA on SM90 and trtllm-gen round queries and weights to e4m3 as well.
    fp8_products=True,
    options=(workspace_bytes("scratch memory, zeroed once; 0: 512 MiB"),),
    verified_on=(
        on_h200("flashinfer-python 0.7.2", date="2026-12-01", torch=TORCH, cases=914),
        Verified(
            on="the trtllm and XQA functions of flashinfer 0.6.13",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-22",
        ),
    ),
    sources={
        "attention_chunk": chunks.SOURCE,
        "version": "flashinfer 0.6.13: trtllm-gen on SM100, XQA and fmha_v2 on SM90 and SM120",
        "runtime": "flashinfer's README: CUDA 12.6 and later",
        "dtype": (
            "jit/xqa.py: fp16 and bf16; fmha_v2_run.cu (`acc_type`) adds up in fp16 where Q is fp16"
        ),
        "kv_dtype": (
            "no pool here stores the library's 4 bits; `trtllm_fmha_v2_prefill` says that its "
            "e4m3 kernels hang on SM90, and refuses e4m3 on SM120"
        ),
        "page_size": (
            "jit/xqa.py: 16, 32, 64, 128; trtllm-gen has 128 for grouped heads of a power of two, "
            "as SGLang 0.5.23 checks"
        ),
        "head_dim": "64, 128 and 256, of the multiples of 16 that jit/xqa.py compiles",
        "group_size": (
            "as page_size: where a page has 128 tokens on SM100; XQA stops compiling for 17 to 24 "
            "heads of 16 bits (mha_sm90.cu) and for more than 32 (mha.cu)"
        ),
        "spec_topk": "masks of a verify step are rows of a chain; there is none for a tree",
    },
    clauses=tuple(
        clause for dtype in ("bfloat16", "float16") for clause in with_chunks(_clauses(dtype))
    ),
    priors=(
        Prior(
            rank=5,
            when=Clause.when(version=DATACENTER_BLACKWELL, spec_topk=NONE),
            source="SGLang 0.5.23's default on SM100 and SM103",
        ),
        Prior(
            rank=34,
            source="SGLang 0.5.23 takes flashinfer when speculating over pages, and elsewhere",
        ),
    ),
)
