"""The card of flashinfer's gated delta rule."""

from __future__ import annotations

from attnmux.core.plugin import ANY, BackendCard, Clause, Prior, one_of, runtimes, versions
from attnmux.nvidia.cards.runs import TORCH, on_h200


def _clause(dtype: str, *phases: str) -> Clause:
    return Clause(
        vendor=one_of("nvidia"),
        version=versions(">=9.0,<9.1"),
        runtime=runtimes("cuda>=12.6"),
        phase=one_of(*phases),
        kind=one_of("gdn"),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype),
        page_size=ANY,
        head_dim=one_of(128),
        v_head_dim=one_of(128),
        spec_topk=one_of(1),
        graph=ANY,
    )


FLASHINFER_GDN = BackendCard(
    name="flashinfer_gdn",
    summary="flashinfer's gated delta rule on SM90, with the convolutions that are installed",
    factory="attnmux.nvidia.linear.flashinfer_gdn:make",
    requires=("torch>=2.11", "flashinfer-python>=0.6.13"),
    extra="flashinfer",
    verified_on=(
        on_h200(
            "flashinfer-python 0.7.2",
            "sglang-kernel 0.4.10",
            date="2026-11-29",
            torch=TORCH,
            cases=70,
        ),
    ),
    sources={
        "version": "gdn_prefill_launcher.cu: SM90; kernels for SM100 are others, and not adapted",
        "runtime": 'README, "Supported CUDA Versions"',
        "dtype": "`chunk_gated_delta_rule`: fp16 and bf16, over float32 states; of fp16 "
        "`gated_delta_rule_decode` rounds outputs to bf16, `gated_delta_rule_mtp` q and k too",
        "kv_dtype": "there is no KV cache; convolution states have the dtype of the call",
        "head_dim": "tiles of 128: prefill_kernel_delta_rule_sm90.cuh, gdn_decode_nontranspose.py",
        "v_head_dim": "`gdn_prefill`: the dims of K and V are the same",
        "spec_topk": "`gated_delta_rule_mtp`: one token after another",
    },
    clauses=(_clause("bfloat16", "extend", "decode", "verify"), _clause("float16", "extend")),
    priors=(
        Prior(
            rank=60,
            source="4.5 times as long as triton_linear in decode on an H200, whose states are "
            "copied to each call and back; 0.97 and 1.17 times as long in prompts",
        ),
    ),
)
