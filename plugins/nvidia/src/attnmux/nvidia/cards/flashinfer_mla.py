"""The card of flashinfer's MLA kernels."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Condition,
    Option,
    Prior,
    at_most,
    emulated,
    one_of,
    runtimes,
    versions,
)
from attnmux.nvidia.cards.runs import TORCH, on_h200
from attnmux.nvidia.cards.scratch import workspace_bytes

DATACENTER_BLACKWELL = versions(">=10.0,<11")


def _clause(dtype: str, kv_dtype: Condition, *, graph: Condition) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=versions(">=8.0"),
        runtime=runtimes("cuda>=12.6"),
        phase=one_of("extend", "decode", "verify", "draft"),
        kind=one_of("mla"),
        dtype=one_of(dtype),
        kv_dtype=kv_dtype,
        page_size=emulated(1),
        num_q_heads=at_most(128),
        head_dim=ANY,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
        graph=graph,
        lse=ANY,
        strided_kv=ANY,
    )


DTYPES = ("bfloat16", "float16")

FLASHINFER_MLA = BackendCard(
    name="flashinfer_mla",
    # What users of other engines type; the request's kind says which card is meant.
    aliases=("flashinfer",),
    summary="flashinfer's MLA kernels: absorbed, over the pool's pages; prefill for others",
    factory="attnmux.nvidia.flashinfer_mla.backend:make",
    requires=("torch>=2.11", "flashinfer-python>=0.6.13"),
    extra="flashinfer",
    needs_cpu_seq_lens=True,
    verified_on=(on_h200("flashinfer-python 0.7.2", date="2026-11-29", torch=TORCH, cases=90),),
    sources={
        "version": "`BatchMLAPagedAttentionWrapper`: fa2 from SM80, fa3 SM90",
        "runtime": 'README, "Supported CUDA Versions"',
        "dtype": "`BatchMLAPagedAttentionWrapper`: fp16 and bf16",
        "kv_dtype": (
            "the kernels read K and V in the dtype of Q: e4m3 is widened first, so that this can "
            "be the prefill half of backends that decode over it; no pool here stores 4 bits"
        ),
        "page_size": "1 is preferred; `load_kv` in mla.cuh divides by any other",
        "num_q_heads": "rows of the largest tile: `kv_tile_idx` in mla.cuh wants whole tokens",
        "kv_lora_rank": "q_nope [n, H, 512], q_pe [n, H, 64]",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "`plan` knows causal or not, and no mask",
    },
    clauses=(
        *(_clause(dtype, one_of(dtype), graph=ANY) for dtype in DTYPES),
        # Keys are widened into memory of the step's size, which no graph has.
        *(_clause(dtype, one_of("fp8_e4m3"), graph=NONE) for dtype in DTYPES),
    ),
    options=(
        Option(
            name="backend",
            type=str,
            default="auto",
            choices=("auto", "fa2", "fa3"),
            summary="kernels: auto is fa3 on SM90, else fa2",
        ),
        workspace_bytes("scratch memory; 0: 256 MiB"),
    ),
    priors=(
        Prior(
            rank=40,
            when=Clause.when(kv_dtype=one_of("fp8_e4m3")),
            source="it widens all latents of a step, eagerly: the decode kernels that read e4m3 "
            "come first",
        ),
        Prior(
            rank=10,
            when=Clause.when(version=DATACENTER_BLACKWELL),
            source="SGLang 0.5.23's default for MLA on SM100 and SM103",
        ),
        Prior(rank=30, source="SGLang 0.5.23 takes fa3 on SM90 and triton on all others"),
    ),
)
