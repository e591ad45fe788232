"""The card of AMD's AITER kernels."""

from __future__ import annotations

from typing import Any

from attnmux.core import ANY, BackendCard, Clause, Condition, Prior, multiple_of, one_of


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        "vendor": one_of("amd"),
        "arch": one_of("gfx942", "gfx950"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
        "page_size": ANY,
        "spec_topk": one_of(1),
        "graph": ANY,
    }
    return Clause(**{**everywhere, **more})


def _mha(dtype: str, **more: Condition) -> Clause:
    return _clause(
        dtype,
        phase=one_of("extend", "decode", "verify", "draft", "encoder"),
        kind=one_of("mha"),
        sinks=ANY,
        logit_cap=ANY,
        **more,
    )


def _mla(dtype: str, **more: Condition) -> Clause:
    return _clause(
        dtype,
        phase=one_of("extend", "decode", "verify", "draft"),
        kind=one_of("mla"),
        head_dim=ANY,
        num_q_heads=multiple_of(16, most=128),
        kv_lora_rank=one_of(512),
        qk_rope_head_dim=one_of(64),
        **more,
    )


AITER = BackendCard(
    name="aiter",
    summary="AMD's AITER: CK and assembly kernels for MHA and MLA on MI300 and MI350",
    status="planned",
    # Not on PyPI, where `aiter` is an unrelated project; `amd-aiter` is the name in its setup.py.
    requires=("torch>=2.11", "amd-aiter"),
    sources={
        "arch": "the assembly and CK kernels are built for CDNA 3 and 4; RDNA crashes in them",
        "dtype": "the dtypes that SGLang 0.5.23's adapter passes on",
        "kv_dtype": "SGLang's manual: no 8-bit and no 4-bit KV",
        "page_size": "verify runs a Triton kernel whose mask of a tree is laid out by token",
        "head_dim": "SGLang 0.5.23's adapter: 64, 128 and 256, and 192 where V has 128",
        "v_head_dim": "as head_dim",
        "num_q_heads": "`mla_decode_fwd` works on tiles of 16 heads",
        "kv_lora_rank": "`mla_decode_fwd`: rows of 576, of which 512 are the latent",
        "qk_rope_head_dim": "as kv_lora_rank",
        "spec_topk": "as page_size: a tree needs pages of one token",
    },
    clauses=tuple(
        clause
        for dtype in ("bfloat16", "float16")
        for spec in ({}, {"spec_topk": ANY, "page_size": one_of(1)})
        for clause in (
            _mha(dtype, head_dim=one_of(128, 64, 256), **spec),
            _mha(dtype, head_dim=one_of(192), v_head_dim=one_of(128), **spec),
            _mla(dtype, **spec),
        )
    ),
    priors=(Prior(rank=10, source="SGLang 0.5.23's default on AMD"),),
)
