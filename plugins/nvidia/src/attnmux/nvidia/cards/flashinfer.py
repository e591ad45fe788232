"""flashinfer's MHA and GQA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Option,
    Prior,
    one_of,
    runtimes,
    versions,
)
from attnmux.nvidia.cards import chunks
from attnmux.nvidia.cards.chunks import with_chunks
from attnmux.nvidia.cards.runs import TORCH, on_h200
from attnmux.nvidia.cards.scratch import workspace_bytes

PAGES = (1, 16, 32, 64, 128)
"""Page sizes for layers with attention chunks, which are whole pages."""


def _clauses(dtype: str) -> Iterator[Clause]:
    everywhere: dict[str, Any] = {
        "vendor": one_of("nvidia"),
        "version": versions(">=8.0"),
        "runtime": runtimes("cuda>=12.6"),
        "kind": one_of("mha"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype, "fp8_e4m3", "fp8_e5m2"),
        "page_size": ANY,
        "head_dim": one_of(128, 64, 256),
        "spec_topk": ANY,
        "sliding_window": ANY,
        "cross_attention": ANY,
        "lse": ANY,
        "strided_kv": ANY,
    }
    masked: dict[str, Any] = {"logit_cap": ANY, "custom_mask": ANY, "multi_item": ANY}
    every = one_of("extend", "decode", "verify", "draft", "encoder")
    plain = Clause(**everywhere, **masked, phase=every, graph=ANY)
    yield from with_chunks([plain], PAGES)
    # The softmax with sinks looks at no cap and no mask but causality and windows (variants.py).
    # It reads the pool, so that parts of prompts over K and V of the call are left to others.
    of_pools: dict[str, Any] = {**everywhere, "cross_attention": NONE, "sinks": ANY}
    drafted = one_of("extend", "decode", "verify", "draft")
    yield from with_chunks([Clause(**of_pools, phase=drafted, graph=ANY)], PAGES)
    # fa2 takes the tile of an extend step from the mean length of its requests, so that sums depend
    # on the rest of the batch. In decode a tile is one token's heads. With `disable_split_kv` a
    # captured decode also runs the blocks of the padded grid, which its plan leaves unset
    # (scheduler.cuh masks them only where it splits): illegal accesses.
    alone: dict[str, Any] = {"phase": one_of("decode"), "deterministic": ANY}
    yield Clause(**everywhere, **alone, logit_cap=ANY, custom_mask=ANY)
    yield Clause(**of_pools, **alone)


FLASHINFER = BackendCard(
    name="flashinfer",
    summary="flashinfer's paged and ragged MHA and GQA kernels, compiled on this machine",
    factory="attnmux.nvidia.flashinfer.backend:make",
    virtual_requests=True,
    requires=("torch>=2.11", "flashinfer-python>=0.6.13"),
    extra="flashinfer",
    needs_cpu_seq_lens=True,
    verified_on=(on_h200("flashinfer-python 0.7.2", date="2026-12-01", torch=TORCH, cases=1879),),
    sources={
        "attention_chunk": chunks.SOURCE,
        "page_size": "as attention_chunk: the usual sizes that divide chunks",
        "version": 'README, "GPU Support": from 7.5 on; 7.5 has no bfloat16 and was not tried',
        "runtime": 'README, "Supported CUDA Versions": 12.6, 12.8, 13.0, 13.1',
        "dtype": "fp16 and bf16: no fp32 instances",
        "kv_dtype": (
            "`is_fa3_backend_supported` sends 8-bit K and V to fa2, which widens them in registers"
        ),
        "head_dim": "fa2's instances; K and V of a pool need the same strides (batch_prefill.cu)",
    },
    clauses=tuple(clause for dtype in ("bfloat16", "float16") for clause in _clauses(dtype)),
    options=(
        Option(
            name="prefill_backend",
            type=str,
            default="auto",
            choices=("auto", "fa2", "fa3"),
            summary="kernels of extend: auto is fa3 on SM90 where it serves the request",
        ),
        Option(
            name="decode_backend",
            type=str,
            default="auto",
            choices=("auto", "fa2", "fa3"),
            summary="kernels of decode with tensor cores: auto is fa2",
        ),
        Option(
            name="use_tensor_cores",
            type=str,
            default="auto",
            choices=("auto", "on", "off"),
            summary="in decode: auto from 4 query heads a KV head on, and with 8-bit KV",
        ),
        workspace_bytes("scratch memory; 0: 256 MiB, or the need of the head counts and graphs"),
    ),
    priors=(
        Prior(
            rank=20,
            when=Clause.when(sinks=NONE, deterministic=NONE),
            source="H200, bf16: next to fa3, and the one that takes draft trees at any page size; "
            "elsewhere the fastest that is there",
        ),
        Prior(
            rank=28,
            source="with sinks it reads all keys by fa2, and deterministic decode cannot be "
            "captured; the field takes fa3, trtllm_mha or triton",
        ),
    ),
)
