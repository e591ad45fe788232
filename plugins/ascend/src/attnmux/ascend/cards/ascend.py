"""The card of CANN's attention operators."""

from __future__ import annotations

from typing import Any

from attnmux.core.choosing.card import BackendCard, Clause, Prior
from attnmux.core.choosing.conditions import ANY, Condition, at_most, multiple_of, one_of


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("ascend"),
        # Atlas A2 and A3; the 310P has operators of its own.
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
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for clause in (
            _clause(
                dtype,
                phase=one_of("extend", "decode", "encoder"),
                kind=one_of("mha"),
                # With more than one query a request: 128 to 512 tokens, a multiple of 128.
                page_size=multiple_of(128, most=512),
                head_dim=multiple_of(16, most=512),
                # `learnable_sink` of the operator's second version. No cap in either.
                sinks=ANY,
            ),
            _clause(
                dtype,
                phase=one_of("extend", "decode"),
                kind=one_of("mla"),
                # Blocks of 16 or 128; prefill as in MHA.
                page_size=one_of(128),
                head_dim=ANY,
                # 32, 64 or 128 heads, to which fewer are padded.
                num_q_heads=at_most(128),
                kv_lora_rank=one_of(512),
                qk_rope_head_dim=one_of(64),
            ),
        )
    ),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on Ascend"),),
)
