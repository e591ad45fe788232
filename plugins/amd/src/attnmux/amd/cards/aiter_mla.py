"""The card of AITER's assembly kernels that decode MLA."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    emulated,
    one_of,
)

_NATIVE, _PLANNED = one_of(16, 128), one_of(*range(32, 128, 16))
_PLANNED_FP8_GFX942 = one_of(32, 48, 80, 96, 112)
"""Without 64, over which AITER from v0.1.18 on faults: https://github.com/ROCm/aiter/issues/4363.
"""


def clause(
    arch: str,
    kv_dtype: str,
    *phases: str,
    heads: Condition = _NATIVE,
    drafts: Condition = ANY,
) -> Clause:
    """The clause of the assembly for one architecture and these phases."""
    return Clause(
        vendor=one_of("amd"),
        arch=one_of(arch),
        phase=one_of(*phases),
        kind=one_of("mla"),
        dtype=one_of("bfloat16"),
        kv_dtype=one_of(kv_dtype),
        page_size=emulated(1),
        head_dim=ANY,
        num_q_heads=heads,
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
        spec_draft_tokens=drafts,
        graph=ANY,
    )


def _clauses(arch: str, fp8: str) -> tuple[Clause, ...]:
    """Over e4m3, steps in which a draft model catches up are another backend's."""
    return (
        clause(arch, "bfloat16", "decode", "verify", "draft"),
        clause(arch, fp8, "decode"),
        clause(arch, fp8, "verify", drafts=one_of(1, 2, 4)),
        # 64 and 32 heads are DeepSeek's on two and four ranks.
        clause(arch, "bfloat16", "decode", heads=_PLANNED),
        clause(arch, fp8, "decode", heads=_PLANNED_FP8_GFX942 if arch == "gfx942" else _PLANNED),
    )


AITER_MLA = BackendCard(
    name="aiter_mla",
    summary="AMD's AITER: its assembly kernels for decoding MLA on MI300 and MI350",
    factory="attnmux.amd.aiter_mla:make",
    requires=("torch>=2.11", "amd-aiter>=0.1.7.post2.dev18"),
    extra="aiter",
    # Over e4m3 the kernels want queries in e4m3, and multiply weights in it.
    fp8_products=True,
    # The first does not read e4m3.
    companions=("aiter", "torch_native"),
    # Emulated only: assembly runs on AMD's devices alone.
    verified_on=(
        Verified(
            on="mla_decode_fwd and mla_prefill_fwd of amd-aiter 0.1.7.post2.dev18",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-28",
        ),
    ),
    sources={
        "arch": "amd-aiter has code objects of MLA for gfx942 and gfx950",
        "dtype": "asm_mla.cu refuses Q of any dtype but bf16 and e4m3; it writes bf16",
        "kv_dtype": (
            "asm_mla.cu: KV in the dtype of Q, unless work is planned ahead; e4m3 is the device's "
            "own, `aiter.dtypes.fp8`"
        ),
        "page_size": "lists hold token slots (page size 1)",
        "num_q_heads": (
            "`get_meta_param` and asm_mla.cu refuse any but 16 and 128; with work that is planned "
            "ahead, `mla_decode_fwd` takes others as requests of 16, for one query each. Over e4m3 "
            "a gfx942 faults with 64 in AITER from v0.1.18 on, by lists of slots (page size 1): "
            "ROCm/aiter#4363"
        ),
        "kv_lora_rank": "the code objects are built for rows of 512 and 64",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "causal over a chain, without a mask",
        "spec_draft_tokens": (
            "asm_mla.cu refuses more than 4 queries a request over e4m3, and has code objects for "
            "1, 2 and 4. In bf16, `mla_prefill_fwd` takes what `mla_decode_fwd` does not"
        ),
    },
    clauses=(*_clauses("gfx942", "fp8_e4m3fnuz"), *_clauses("gfx950", "fp8_e4m3")),
    priors=(
        Prior(
            rank=27,
            source="SGLang 0.5.23 and vLLM decode MLA with it on AMD; here it ran only on an "
            "emulator, so it comes after aiter and triton, whose kernels ran",
        ),
    ),
)
