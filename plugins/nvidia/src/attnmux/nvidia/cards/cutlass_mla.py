"""The card of the CUTLASS decode kernel for MLA."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Option,
    Prior,
    Verified,
    at_most,
    one_of,
    versions,
)


def _clause(dtype: str) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=versions(">=10.0,<10.1"),
        phase=one_of("decode"),
        kind=one_of("mla"),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype),
        page_size=one_of(128),
        head_dim=ANY,
        num_q_heads=at_most(128),
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
        graph=ANY,
    )


CUTLASS_MLA = BackendCard(
    name="cutlass_mla",
    summary="CUTLASS's MLA decode on SM100 over pages of 128 tokens",
    factory="attnmux.nvidia.latent.cutlass_mla:make",
    # sglang-kernel 0.4.10 has no `cutlass_mla_decode`; sgl-kernel, its name before 0.4, is built
    # for older releases of torch.
    requires=("torch>=2.11", ("vllm>=0.32", "sglang-kernel>=0.4.5,<0.4.10")),
    companions=("flashinfer_mla",),
    options=(
        Option(
            name="num_kv_splits",
            type=int,
            default=1,
            least=-1,
            most=256,
            summary="parts that the keys of a request are split into; -1 lets the kernel choose, "
            "which a captured graph must not",
        ),
    ),
    verified_on=(
        Verified(
            on="cutlass_mla_decode of sglang-kernel 0.4.5 and of vLLM 0.33.0",
            libraries=("torch 2.14.1",),
            date="2026-11-29",
        ),
    ),
    sources={
        "version": "cutlass_mla_kernel.cu refuses all but compute capability 10.0",
        "dtype": "`cutlass_mla_decode` checks for fp16 or bf16",
        "kv_dtype": "`cutlass_mla_decode` wants Q and the cache in one dtype",
        "page_size": (
            "tables hold a multiple of 128 / page blocks; at 128 any number does, and pages are "
            "loaded whole"
        ),
        "num_q_heads": "`cutlass_mla_decode` pads heads to 128",
        "kv_lora_rank": "`cutlass_mla_decode`: q_nope [B, H, 512], q_pe [B, H, 64]",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "declared for plain decode too; verify and draft are the companion's",
    },
    clauses=tuple(map(_clause, ("bfloat16", "float16"))),
    priors=(Prior(rank=36, source="vLLM 0.33 ranks it after flashinfer's MLA on SM100"),),
)
