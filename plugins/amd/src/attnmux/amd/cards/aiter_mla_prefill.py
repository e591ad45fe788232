"""The card of AITER's assembly kernels that take prompts of MLA."""

from __future__ import annotations

from attnmux.amd.cards.aiter_mla import AITER_MLA, clause
from attnmux.core.plugin import BackendCard, Prior

AITER_MLA_PREFILL = BackendCard(
    name="aiter_mla_prefill",
    summary="AMD's AITER: its assembly kernels for prompts of MLA on MI300 and MI350",
    factory="attnmux.amd.aiter_mla:make",
    requires=AITER_MLA.requires,
    extra=AITER_MLA.extra,
    companions=("aiter_mla",),
    # Emulated only: assembly runs on AMD's devices alone.
    verified_on=AITER_MLA.verified_on,
    sources={
        "arch": "amd-aiter has code objects of MLA's prefill for gfx942 and gfx950",
        "dtype": "`mla_prefill_asm_fwd` in asm_mla.cu refuses Q of any dtype but bf16",
        "kv_dtype": "its only code objects are a16w16",
        "page_size": "lists hold token slots (page size 1)",
        "num_q_heads": "asm_mla.cu refuses any but 16 and 128",
        "kv_lora_rank": "the code objects are built for rows of 512 and 64",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "causal over a chain, without a mask",
    },
    clauses=tuple(
        clause(arch, "bfloat16", "extend", "verify", "draft") for arch in ("gfx942", "gfx950")
    ),
    priors=(
        Prior(
            rank=28,
            source="SGLang 0.5.23 takes prompts with a prefix, and drafts, by it on AMD; here it "
            "ran only on an emulator, so it comes after aiter and triton, whose kernels ran",
        ),
    ),
)
