"""The card of TensorRT-LLM's MLA decode kernels, which flashinfer ships."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
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
from attnmux.nvidia.cards.scratch import workspace_bytes


def _clause(version: Condition, num_q_heads: Condition, *phases: str) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=version,
        runtime=runtimes("cuda>=12.6"),
        # Prefill is the companion's.
        phase=one_of(*phases),
        kind=one_of("mla"),
        dtype=one_of("bfloat16"),
        kv_dtype=one_of("bfloat16", "fp8_e4m3"),
        page_size=one_of(64, 32),
        head_dim=ANY,
        num_q_heads=num_q_heads,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
        graph=ANY,
    )


TRTLLM_MLA = BackendCard(
    name="trtllm_mla",
    summary="TensorRT-LLM's MLA decode through flashinfer, in bf16 or e4m3; SM100 and SM120",
    factory="attnmux.nvidia.latent.trtllm_mla:make",
    requires=("torch>=2.11", "flashinfer-python>=0.6.13"),
    extra="flashinfer",
    # Over e4m3 the kernels want queries in e4m3, and round weights to it.
    fp8_products=True,
    companions=("flashinfer_mla",),
    options=(workspace_bytes("scratch memory, zeroed once; 0: 128 MiB"),),
    verified_on=(
        Verified(
            on="the trtllm and XQA functions of flashinfer 0.6.13",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-22",
        ),
    ),
    sources={
        "version": "flashinfer 0.6.13: trtllm-gen on SM100, XQA on SM120",
        "runtime": "flashinfer's README: CUDA 12.6 and later",
        "dtype": "XQA takes bf16 or e4m3; SGLang 0.5.23 passes bf16",
        "kv_dtype": "SGLang 0.5.23 refuses any but bf16 and e4m3; XQA takes both",
        "page_size": "SGLang 0.5.23: 32 or 64, else it is set to 64",
        "num_q_heads": (
            "from 65 to 127 heads trtllm-gen has no kernel; `xqa_mla` takes 128: fewer get padded"
        ),
        "kv_lora_rank": "`_check_trtllm_gen_mla_shape`: 512 and 64; a smaller pair was not tried",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "causal over the step's tokens, without a mask",
    },
    clauses=(
        _clause(versions(">=10.0,<11"), at_most(64), "decode", "verify", "draft"),
        _clause(versions(">=10.0,<11"), one_of(128), "decode", "verify", "draft"),
        # XQA, which takes one query a request and 128 heads: fewer are padded.
        _clause(versions(">=12.0,<13"), at_most(128), "decode"),
    ),
    priors=(
        Prior(rank=33, source="SGLang 0.5.23 takes it by name, or for single models on SM100"),
    ),
)
