"""The offers of attnmux-triton, as data: two cards. Triton belongs to no vendor, so no platform.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Build,
    Caveat,
    Clause,
    Condition,
    ErrorBound,
    Figures,
    Option,
    Prior,
    Verified,
    anything_but,
    emulated,
    hookimpl,
    multiple_of,
    one_of,
)

REQUIRES = ("torch>=2.11", ("triton>=3.6", "triton-rocm>=3.6", "triton-xpu>=3.6"))
"""torch brings Triton, under other names for AMD and Intel: 2.11 pins 3.6 on NVIDIA and AMD, 3.7 on
Intel."""

HOPPER_RELEASES = ">=3.6,<3.10,!=3.7.*"
"""Releases of Triton with which the kernels for Hopper ran on an H200. 3.7 compiles them. They are
written in Gluon, which is experimental and changes with each release."""

TOKENS = emulated(1)
"""The kernels gather by token index: to them a page of any size is a list of tokens."""


COMPILED = (
    *("amd:gfx1100", "amd:gfx1201", "amd:gfx90a", "amd:gfx942", "amd:gfx950"),
    *("nvidia:sm75", "nvidia:sm80", "nvidia:sm86", "nvidia:sm89"),
    *("nvidia:sm100", "nvidia:sm103", "nvidia:sm120"),
)
"""The chips of `nox -s chips` on which nothing ran. benchmarks/results/chips.md says how much of
the card's offer compiled for each."""


def _clause(dtype: str, **more: Condition) -> Clause:
    everywhere: dict[str, Any] = {
        # Triton generates no code for CPUs and Apple's GPUs; Ascend's Triton is another project.
        "vendor": anything_but("cpu", "ascend", "apple"),
        "dtype": one_of(dtype),
        "page_size": TOKENS,
        "spec_topk": one_of(1),
        "custom_mask": ANY,
        "deterministic": ANY,
        "graph": ANY,
        "lse": ANY,
        "strided_kv": ANY,
    }
    return Clause(**{**everywhere, **more})


_CDNA3: dict[str, Condition] = {
    "vendor": one_of("amd"),
    "arch": one_of("gfx942"),
    "kv_dtype": one_of("fp8_e4m3fnuz"),
}


_FOUR_BITS: dict[str, Condition] = {
    "kv_dtype": one_of("fp4_e2m1"),
    "head_dim": multiple_of(16, most=512),
    "v_head_dim": multiple_of(16, most=512),
    "strided_kv": NONE,
}


_WITHOUT_E4M3 = ("sm70", "sm72", "sm75", "sm80", "sm86", "sm87", "sm88")
"""NVIDIA's GPUs whose Triton has no e4m3: `fp8e4nv` begins at SM89."""


def _by_arch(clause: Clause, dtype: str) -> Iterator[Clause]:
    """The clause, without e4m3 on GPUs that cannot read it."""
    if not clause.kv_dtype.admits("fp8_e4m3"):
        yield clause
        return
    yield replace(clause, kv_dtype=one_of(dtype, "fp8_e5m2"))
    yield replace(clause, kv_dtype=one_of("fp8_e4m3"), arch=anything_but(*_WITHOUT_E4M3))


def _clauses(dtype: str) -> Iterator[Clause]:
    of_heads: dict[str, Condition] = {
        "kind": one_of("mha"),
        "kv_dtype": one_of(dtype, "fp8_e4m3", "fp8_e5m2"),
        "head_dim": multiple_of(1, most=512),
        "v_head_dim": multiple_of(1, most=512),
        "sliding_window": ANY,
        "attention_chunk": ANY,
        "sinks": ANY,
    }
    for spec in ({}, {"spec_topk": ANY, "page_size": one_of(1)}):
        yield _clause(
            dtype,
            # The encoder phase is a non-causal prefill without a cache.
            phase=one_of("extend", "decode", "verify", "draft", "encoder"),
            cross_attention=ANY,
            logit_cap=ANY,
            tree_windows=ANY if "spec_topk" in spec else NONE,
            **{**of_heads, **spec},
        )
        yield _clause(
            dtype,
            phase=one_of("extend", "decode", "verify", "draft"),
            logit_cap=ANY,
            # CDNA3's own e4m3. Its Triton converts the other one too, by several instructions.
            **{**of_heads, **_CDNA3, **spec},
        )
        yield _clause(
            dtype,
            phase=one_of("extend", "decode", "verify", "draft"),
            logit_cap=ANY,
            cross_attention=ANY,
            tree_windows=ANY if "spec_topk" in spec else NONE,
            **{**of_heads, **_FOUR_BITS, **spec},
        )
        yield _clause(
            dtype,
            phase=one_of("extend", "decode", "verify", "draft"),
            kind=one_of("mla"),
            arch=anything_but("sm75"),
            kv_dtype=one_of(dtype),
            head_dim=ANY,
            kv_lora_rank=multiple_of(1, most=512),
            qk_rope_head_dim=multiple_of(1, most=64),
            **spec,
        )
    yield _clause(
        dtype,
        phase=one_of("extend", "decode", "verify", "draft"),
        kind=one_of("nsa"),
        arch=anything_but("sm70", "sm72", "sm75"),
        kv_dtype=one_of(dtype, "fp8_e4m3", "fp8_e5m2"),
        head_dim=ANY,
        kv_lora_rank=multiple_of(1, most=512),
        qk_rope_head_dim=multiple_of(1, most=64),
        sinks=ANY,
        custom_mask=NONE,
    )
    # Biases by distance count places in the sequence, which the nodes of a draft tree do not have.
    yield _clause(
        dtype,
        phase=one_of("extend", "decode", "verify", "draft"),
        custom_mask=NONE,
        alibi=ANY,
        **of_heads,
    )
    yield _clause(
        dtype,
        phase=one_of("extend", "decode", "verify", "draft", "encoder"),
        custom_mask=NONE,
        cross_attention=ANY,
        relative_bias=ANY,
        **of_heads,
    )


ROUNDED_ERROR = 16
"""The error of answers over e4m3 K and V with queries and weights rounded to e4m3, in roundings of
the output's format: see `ErrorBound`."""

OPTIONS = (
    Option(
        name="num_kv_splits",
        type=int,
        default=0,
        least=0,
        most=1024,
        summary="at most this many parts of a request's keys in decode and verification, of 256 "
        "tokens at least unless split_tile_size says otherwise; 0: by the batch, on the device",
    ),
    Option(
        name="split_tile_size",
        type=int,
        default=0,
        least=0,
        most=1 << 20,
        summary="tokens a part of a request's keys, more if there would be more parts than "
        "num_kv_splits or else 32; 0: as num_kv_splits says",
    ),
    Option(
        name="reduce_in_fp32",
        type=bool,
        default=False,
        summary="keep the results of parts that these options ask for in fp32 until they are "
        "merged; those of others always are",
    ),
    Option(
        name="fp8_products",
        type=str,
        default="none",
        choices=("none", "queries", "all"),
        summary="on Hopper, let prompts over e4m3 K and V round to e4m3: Q by queries, the "
        "softmax's weights too by all; they are faster and have errors of up to "
        f"{ROUNDED_ERROR} roundings, and a max_error of as many lets them round all",
    ),
)

TRITON = BackendCard(
    name="triton",
    summary="portable Triton kernels, MHA and MLA: windows, sinks, caps, masks, 8-bit KV, graphs",
    factory="attnmux.triton.attention.factory:triton",
    tree_masks=BackendCard.TREE_MASKS,
    requires=REQUIRES,
    extra="triton",
    options=OPTIONS,
    builds=(
        Build(name="Hopper", arch=("sm90",), requires=(f"triton{HOPPER_RELEASES}",)),
        Build(name="any GPU"),
    ),
    caveats=(
        Caveat(
            text=f"the kernels for Hopper need Triton {HOPPER_RELEASES}; the slower "
            "portable ones serve",
            unless=(f"triton{HOPPER_RELEASES}",),
            arch=("sm90",),
        ),
    ),
    tuner="attnmux.triton.tune.tuning:tune",
    error_bounds=(
        ErrorBound(
            max_error=1,
            keys=131072,
            kv_dtype=one_of("bfloat16", "fp8_e4m3"),
            source="0.72 on an H200, D 128",
        ),
    ),
    verified_on=(
        Verified(
            on="NVIDIA H200",
            platform="nvidia:sm90",
            libraries=("torch 2.14.1+cu130", "triton 3.8.0"),
            date="2026-11-29",
            cases=1972,
        ),
        *(
            Verified(
                on="Triton's compiler",
                platform=chip,
                compiled=True,
                libraries=("triton 3.8.0",),
                date="2026-11-29",
                phases=("extend", "decode", "verify", "draft"),
            )
            for chip in COMPILED
        ),
    ),
    sources={
        "arch": (
            "the compilers of Triton: that for NVIDIA has fp8e4nv from SM89 on "
            "(`supported_fp8_dtypes`); of AMD's GPUs, CDNA3 alone converts e4m3fnuz natively. Of "
            "shared memory, tiles of latents take 69,632 bytes and those of picked ones 102,400: "
            "SM75 has 65,536, SM70 and SM72 98,304"
        ),
        "dtype": "16-bit floats, which tensor cores multiply",
        "kv_dtype": (
            "k_scale and v_scale are the kernels' arguments; 4-bit floats have scales of blocks "
            "next to them, in pools of multi-head attention alone"
        ),
        "page_size": (
            "the kernels gather by token index; masks of trees are laid out by token: SGLang "
            "0.5.23 allows trees over pages, its manual does not"
        ),
        "head_dim": (
            "no limit is stated; the largest tiles that SGLang's kernels name have 512 columns "
            "(`Lk == 576` in decode_attention.py: 512, and 64 more of MLA's K); 16 4-bit floats "
            "of a head share a scale"
        ),
        "v_head_dim": "as head_dim",
        "kv_lora_rank": "as head_dim",
        "qk_rope_head_dim": "as head_dim: 64 more of MLA's K",
        "spec_topk": "as page_size: trees at page 1",
    },
    clauses=tuple(
        part
        for dtype in ("bfloat16", "float16")
        for clause in _clauses(dtype)
        for part in _by_arch(clause, dtype)
    ),
    priors=(
        Prior(
            rank=25,
            source="SGLang 0.5.23's default where neither fa3, trtllm_mha nor flashinfer serves, "
            "and for MLA where no vendor's kernel does",
        ),
    ),
)


def _linear_clause(dtype: str, *kinds: str, v_head_dim: Condition) -> Clause:
    return Clause(
        vendor=anything_but("cpu", "ascend", "apple"),
        phase=one_of("extend", "decode", "verify"),
        kind=one_of(*kinds),
        dtype=one_of(dtype),
        kv_dtype=one_of(dtype),
        page_size=ANY,
        head_dim=multiple_of(1, most=256),
        v_head_dim=v_head_dim,
        spec_topk=one_of(1),
        graph=ANY,
    )


TRITON_LINEAR = BackendCard(
    name="triton_linear",
    summary="portable Triton kernels of recurrent and convolutional layers, also in graphs",
    factory="attnmux.triton.linear.backend:TritonLinearBackend",
    requires=REQUIRES,
    extra="triton",
    sources={
        "spec_topk": "the states of a tree's branches are not kept",
        "dtype": "states are float32; products of float32 calls are not rounded to TF32",
        "kv_dtype": "there is no KV cache; convolution states have the dtype of the call",
        "head_dim": "the K of a chunk is one tile",
        "v_head_dim": "as head_dim; in mamba1 every channel is a head with a V of one dim",
    },
    clauses=tuple(
        _linear_clause(dtype, *kinds, v_head_dim=v_head_dim)
        for dtype in ("bfloat16", "float16", "float32")
        for kinds, v_head_dim in (
            (("gdn", "kda", "mamba2", "lightning", "conv"), multiple_of(1, most=256)),
            (("mamba1",), one_of(1)),
        )
    ),
    priors=(Prior(rank=25, source="no other serves a GPU but torch_linear, a last resort"),),
    verified_on=(
        Verified(
            on="NVIDIA H200",
            platform="nvidia:sm90",
            libraries=("torch 2.14.1+cu130", "triton 3.8.0"),
            date="2026-11-29",
            cases=504,
        ),
    ),
)


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [TRITON, TRITON_LINEAR]


@hookimpl
def attnmux_figures() -> list[Figures]:
    return Figures.in_folder(Path(__file__).parent / "figures")
