"""The card of sgl_kernel's causal convolutions."""

from __future__ import annotations

from attnmux.core.plugin import ANY, BackendCard, Clause, Prior, Verified, one_of, versions

SGL_CONV = BackendCard(
    name="sgl_conv",
    summary="sgl_kernel's causal convolutions, for layers that are nothing else",
    factory="attnmux.nvidia.linear.sgl_conv:make",
    requires=("torch>=2.11", "sglang-kernel>=0.4.5"),
    extra="fa3",
    verified_on=(
        Verified(
            on="NVIDIA H200",
            platform="nvidia:sm90",
            libraries=("torch 2.14.1+cu130", "sglang-kernel 0.4.10"),
            date="2026-11-29",
            cases=54,
        ),
    ),
    sources={
        "version": "sgl_kernel's load_utils.py: SM90 has a build of its own; others are not tried",
        "dtype": "causal_conv1d.cu: float, half and bfloat16, alike in all tensors",
        "kv_dtype": "there is no KV cache; states have the dtype of the call",
        "spec_topk": "drafts are one sequence after each request's last inputs",
    },
    clauses=tuple(
        Clause(
            vendor=one_of("nvidia"),
            version=versions(">=9.0,<9.1"),
            phase=one_of("extend", "decode", "verify"),
            kind=one_of("conv"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            page_size=ANY,
            head_dim=ANY,
            v_head_dim=ANY,
            spec_topk=one_of(1),
            graph=ANY,
        )
        for dtype in ("bfloat16", "float16", "float32")
    ),
    priors=(
        Prior(
            rank=60,
            source="2.1 to 3.9 times as long as triton_linear on an H200: tokens of a prompt are "
            "transposed, there and back",
        ),
    ),
)
