"""The card of CANN's attention operators."""

from __future__ import annotations

from typing import Any

from attnmux.core import ANY, BackendCard, Clause, Condition, Prior, at_most, multiple_of, one_of


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("ascend"),
        "arch": one_of("910b", "910c", "910_93"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
        "deterministic": ANY,
        # ACL graphs, whose lengths are updated before a replay.
        "graph": ANY,
        "lse": ANY,
    }
    return Clause(**{**everywhere, **more})


ASCEND = BackendCard(
    name="ascend",
    summary="CANN's fused attention operators through torch-npu, MHA and MLA; Atlas A2 and A3",
    status="planned",
    requires=("torch>=2.11", "torch-npu>=2.13"),
    extra="npu",
    # Lengths are host lists in `npu_fused_infer_attention_score`.
    needs_cpu_seq_lens=True,
    sources={
        "arch": "Atlas A2 and A3; the 310P has operators of its own",
        "dtype": "`npu_fused_infer_attention_score`, torch-npu 2.13: fp16 and bf16",
        "kv_dtype": "as dtype; int8 and int4 are dequantised by parameters that no pool here holds",
        "page_size": (
            "the same operator: with more than one query a request, 128 to 512 tokens and a "
            "multiple of 128; over a latent 16 or 128"
        ),
        "head_dim": "the same operator: a multiple of 16, at most 512",
        "num_q_heads": "the same operator over a latent: 32, 64 or 128, to which fewer are padded",
        "kv_lora_rank": "the same operator: 512 and a rotary part of 64",
        "qk_rope_head_dim": "as kv_lora_rank",
    },
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for clause in (
            _clause(
                dtype,
                phase=one_of("extend", "decode", "encoder"),
                kind=one_of("mha"),
                page_size=multiple_of(128, most=512),
                head_dim=multiple_of(16, most=512),
                # `learnable_sink` of the operator's second version. No cap in either.
                sinks=ANY,
            ),
            _clause(
                dtype,
                phase=one_of("extend", "decode"),
                kind=one_of("mla"),
                page_size=one_of(128),
                head_dim=ANY,
                num_q_heads=at_most(128),
                kv_lora_rank=one_of(512),
                qk_rope_head_dim=one_of(64),
            ),
        )
    ),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on Ascend"),),
)
