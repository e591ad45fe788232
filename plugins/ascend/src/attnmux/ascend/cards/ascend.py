"""The card of CANN's attention operators."""

from __future__ import annotations

from typing import Any

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    at_most,
    emulated,
    multiple_of,
    one_of,
)

_PHASES = ("extend", "decode", "verify", "draft")


def _clause(dtype: str, *phases: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("ascend"),
        "arch": one_of("910b", "910c", "910_93"),
        "phase": one_of(*phases),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
    }
    return Clause(**{**everywhere, **more})


def _mha(*phases: str, **more: Condition) -> Clause:
    """MHA and GQA, in the only dtype of packed queries. No window: its meaning of `pre_tokens` in
    `sparse_mode` 4 was not seen on a device."""
    return _clause(
        "bfloat16",
        *phases,
        kind=one_of("mha"),
        page_size=multiple_of(128, most=512),
        num_q_heads=at_most(256),
        group_size=at_most(64),
        **more,
    )


def _mla(dtype: str) -> Clause:
    return _clause(
        dtype,
        *_PHASES,
        kind=one_of("mla"),
        page_size=one_of(128, 16),
        head_dim=ANY,
        num_q_heads=at_most(128),
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        spec_topk=one_of(1),
    )


ASCEND = BackendCard(
    name="ascend",
    summary="CANN's fused attention operators through torch-npu, MHA and MLA; Atlas A2 and A3",
    factory="attnmux.ascend.ascend:make",
    requires=("torch>=2.11", "torch-npu>=2.13"),
    extra="npu",
    # Lengths are host lists.
    needs_cpu_seq_lens=True,
    # Emulated only: no part of it has run on an Ascend device.
    verified_on=(
        Verified(
            on="npu_fused_infer_attention_score_v2, _npu_paged_attention_mla and npu_ring_mla, "
            "torch-npu 2.14.0",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-28",
        ),
    ),
    sources={
        "arch": "Atlas A2 and A3; the 310P has operators of its own",
        "dtype": (
            "docs of `aclnnFusedInferAttentionScoreV4`, which the operator calls: in layout TND "
            "bfloat16 alone, except with a latent. `npu_ring_mla` takes float16 too, but its docs "
            "do not give the mask's values there"
        ),
        "kv_dtype": "as dtype; int8 and int4 are dequantised by parameters that no pool here holds",
        "page_size": (
            "docs of `npu_fused_infer_attention_score_v2`, torch-npu 2.14: with more than one "
            "query a request, 128 to 512 tokens and a multiple of 128; with a latent 16 or 128. "
            "`npu_ring_mla` reads no pages: its keys are gathered"
        ),
        "head_dim": (
            "the checks of its tiling for A2 (ops-transformer, arch22): in layout TND 64, 128 and "
            "192, of which the docs exclude V of 192 over pages. 192 runs on `npu_ring_mla`"
        ),
        "v_head_dim": (
            "docs of `torch_npu.atb.npu_ring_mla`, torch-npu 2.14: K of 128 and 64 dims, V of 128; "
            "V of 192 takes two calls"
        ),
        "num_q_heads": "its docs: at most 256; with a latent powers of two up to 128. "
        "`npu_ring_mla`'s give no limit: at most DeepSeek's 128",
        "group_size": "its docs: at most 64. Expanded heads have K and V of their own",
        "kv_lora_rank": "its docs: 512 and a rotary part of 64",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "a tree needs a mask of its own, which layout TND does not take",
    },
    clauses=(
        _mha(*_PHASES, head_dim=one_of(128, 64), spec_topk=one_of(1), lse=ANY, graph=ANY),
        # `learnable_sink`, for V of 64 or 128. The docs do not say whether its LSE has them.
        _mha(*_PHASES, head_dim=one_of(128, 64), spec_topk=one_of(1), sinks=ANY, graph=ANY),
        _mha("encoder", head_dim=one_of(128, 64)),
        # No LSE: layout TND has none with a latent, `_npu_paged_attention_mla` none at all. No
        # graphs: torch-npu does not renew the latter's lengths.
        _mla("bfloat16"),
        _mla("float16"),
        # `npu_ring_mla`: prompts of MLA with expanded heads, in parts or over keys of a pool.
        _clause(
            "bfloat16",
            "extend",
            kind=one_of("mha"),
            page_size=emulated(1),
            head_dim=one_of(192),
            v_head_dim=one_of(128),
            num_q_heads=at_most(128),
            group_size=one_of(1),
            cross_attention=ANY,
            lse=ANY,
        ),
    ),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on Ascend"),),
)
