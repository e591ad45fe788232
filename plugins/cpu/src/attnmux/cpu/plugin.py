"""The offers of attnmux-cpu, as data. Importing this module imports no torch.

The CPU itself is found by core, since it is on every machine.
"""

from __future__ import annotations

import platform
from pathlib import Path

from attnmux.core import Platform
from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Build,
    Clause,
    Condition,
    Figures,
    Prior,
    Verified,
    between,
    hookimpl,
    includes,
    multiple_of,
    one_of,
    versions,
)
from attnmux.cpu.levels import levels_of, shipped

_UNSCALED = ("bfloat16", "float16", "float32")
DTYPES = one_of(*_UNSCALED)
KV_DTYPES = one_of(*_UNSCALED, "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz")


def _plain(kind: str, **more: Condition) -> Clause:
    everything: dict[str, Condition] = {
        "vendor": ANY,
        "phase": one_of("extend", "decode", "verify", "draft", "encoder"),
        "kind": one_of(kind),
        "dtype": DTYPES,
        "kv_dtype": KV_DTYPES,
        "page_size": ANY,
        "head_dim": ANY,
        "v_head_dim": ANY,
        "spec_topk": ANY,
        "tree_windows": ANY,
        "sliding_window": ANY,
        "attention_chunk": ANY,
        "cross_attention": ANY,
        "sinks": ANY,
        "logit_cap": ANY,
        "custom_mask": ANY,
        "multi_item": ANY,
        "deterministic": ANY,
        "lse": ANY,
        "strided_kv": ANY,
    }
    return Clause(**{**everything, **more})


_ALIBI: dict[str, Condition] = {
    "phase": one_of("extend", "decode", "verify", "draft"),
    "spec_topk": one_of(1),
    "tree_windows": NONE,
    "cross_attention": NONE,
    "logit_cap": NONE,
    "custom_mask": NONE,
    "multi_item": NONE,
    "alibi": ANY,
}
"""ALiBi counts places in the sequence, where the nodes of a draft tree and the tokens of several
items lie one after another. What else is left out, no layer has."""

_RELATIVE: dict[str, Condition] = {
    **{name: condition for name, condition in _ALIBI.items() if name not in ("phase", "alibi")},
    "cross_attention": ANY,
    "relative_bias": ANY,
}
"""Relative position biases count places as ALiBi does. Encoders and models with cross-attention
have them too."""


def _on_h200(date: str, cases: int) -> Verified:
    """date, cases: as in benchmarks/results/conformance.md."""
    return Verified(
        on="NVIDIA H200",
        platform="nvidia:sm90",
        libraries=("torch 2.11.0+cu130",),
        date=date,
        cases=cases,
    )


_FOUR_BITS: dict[str, Condition] = {
    "phase": one_of("extend", "decode", "verify", "draft"),
    "kv_dtype": one_of("fp4_e2m1"),
    "head_dim": multiple_of(16),
    "v_head_dim": multiple_of(16),
    "strided_kv": NONE,
}
"""Conditions of 4-bit floats: 16 values of a head share a scale."""

_LATENT: dict[str, Condition] = {"kv_lora_rank": ANY, "qk_rope_head_dim": ANY}

_SPARSE = Clause(
    **_LATENT,
    # On a GPU a kernel gathers the keys of each token by itself.
    vendor=one_of("cpu"),
    phase=one_of("extend", "decode", "verify", "draft"),
    kind=one_of("nsa"),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
    page_size=ANY,
    head_dim=ANY,
    v_head_dim=ANY,
    spec_topk=one_of(1),
    sinks=ANY,
    lse=ANY,
    strided_kv=ANY,
)

TORCH_NATIVE = BackendCard(
    name="torch_native",
    summary="attention in plain torch operations, on any device, without graphs",
    factory="attnmux.cpu.torch_native:TorchNativeBackend",
    tree_masks=BackendCard.TREE_MASKS,
    requires=("torch>=2.11",),
    extra="torch",
    verified_on=(
        Verified(
            on="Intel Xeon with AVX-512",
            platform="cpu:x86_64",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-22",
            cases=552,
        ),
        _on_h200("2026-11-23", cases=595),
    ),
    sources={
        "dtype": "torch's matrix products and softmax have all three",
        "kv_dtype": "8-bit and 4-bit floats are widened; MLA's pool holds no 4 bits",
        "head_dim": "with 4-bit floats: 16 values of a head share a scale",
        "v_head_dim": "as head_dim",
        "page_size": "as spec_topk",
        "spec_topk": "a draft tree over MLA is offered on accelerators at page 1 alone, where the "
        "kernels made for the hardware take it too: a page size must not be what sends it to plain "
        "torch unnoticed",
    },
    clauses=(
        _plain("mha"),
        _plain("mha", **_FOUR_BITS),
        _plain("mha", **_ALIBI),
        _plain("mha", **_RELATIVE),
        _plain("mla", **_LATENT, vendor=one_of("cpu")),
        _plain("mla", **_LATENT, spec_topk=one_of(1), tree_windows=NONE),
        _plain("mla", **_LATENT, page_size=one_of(1)),
        _SPARSE,
    ),
    priors=(
        Prior(
            rank=50,
            when=Clause.when(vendor=one_of("cpu")),
            source="at best a third of the bandwidth, on an EPYC with AVX-512",
        ),
        Prior(
            rank=Prior.LAST_RESORT,
            source="gathers K and V before it multiplies, which a GPU kernel does not",
        ),
    ),
)


_ARCH = Platform.parse(f"cpu:{platform.machine() or 'unknown'}").arch
_OWN: dict[str, Condition] = {
    "vendor": one_of("cpu"),
    "kv_dtype": one_of(*_UNSCALED, "fp8_e4m3", "fp8_e5m2"),
}
_WAYS: list[dict[str, Condition]] = [
    {**_OWN, "features": includes("cxx_compiler")},
    *([{**_OWN, "arch": one_of(_ARCH)}] if shipped(_ARCH) else ()),
]
"""The kernels are compiled when the backend is first made, or came with the wheel."""

NATIVE = BackendCard(
    name="native",
    summary="C++ for the CPU's own level: rows are read where they lie, in any page size",
    factory="attnmux.cpu.native:NativeBackend",
    ahead="attnmux.cpu.compiled:begin",
    tree_masks=BackendCard.TREE_MASKS,
    requires=("torch>=2.11",),
    extra="torch",
    verified_on=(
        Verified(
            on="Intel Xeon with AVX-512-BF16 and AMX",
            platform="cpu:x86_64",
            libraries=("torch 2.11.0+cu130",),
            date="2026-11-26",
            cases=1098,
        ),
        Verified(
            on="AMD EPYC with AVX2",
            platform="cpu:x86_64",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-24",
        ),
    ),
    sources={
        "features": "the kernels are compiled when the backend is first made, and kept, where they "
        "did not come with the wheel",
        "dtype": "values are widened to float32, where the CPU has no products of bfloat16",
        "kv_dtype": "as dtype",
    },
    builds=tuple(
        Build(name=level.name, features=level.features)
        for level in shipped(_ARCH) or levels_of(_ARCH)
    ),
    clauses=tuple(
        clause
        for way in _WAYS
        for clause in (_plain("mha", **way), _plain("mla", **_LATENT, **way))
    ),
    priors=(
        Prior(
            rank=45,
            source="decode at 2.8 to 12 times the speed of torch_native, on an EPYC with AVX2 and "
            "a Xeon with AMX",
        ),
    ),
)


TORCH_LINEAR = BackendCard(
    name="torch_linear",
    summary="recurrent and convolutional layers in plain torch operations, on any device",
    factory="attnmux.cpu.torch_linear:TorchLinearBackend",
    requires=("torch>=2.11",),
    extra="torch",
    verified_on=(
        Verified(
            on="Intel Xeon with AVX-512",
            platform="cpu:x86_64",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-25",
            phases=("extend", "decode"),
        ),
        Verified(
            on="AMD EPYC with AVX2",
            platform="cpu:x86_64",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-28",
            cases=597,
        ),
    ),
    sources={
        "dtype": "states and products are float32, whatever the dtype of the call",
        "kv_dtype": "there is no KV cache; convolution states have the dtype of the call",
        "spec_topk": "the states of a tree's branches are not kept",
    },
    clauses=tuple(
        Clause(
            vendor=ANY,
            phase=one_of("extend", "decode", "verify"),
            kind=one_of("gdn", "kda", "mamba1", "mamba2", "lightning", "conv"),
            dtype=one_of(dtype),
            kv_dtype=one_of(dtype),
            page_size=ANY,
            head_dim=ANY,
            v_head_dim=ANY,
            spec_topk=one_of(1),
            graph=ANY,
        )
        for dtype in _UNSCALED
    ),
    priors=(
        Prior(rank=50, when=Clause.when(vendor=one_of("cpu")), source="no other serves a CPU"),
        Prior(
            rank=Prior.LAST_RESORT, source="reads the state of a chunk from memory for each product"
        ),
    ),
)


def _flex(dtype: str, **more: Condition) -> Clause:
    """The clause of flex_attention for one dtype. K and V must be stored in it."""
    everywhere: dict[str, Condition] = {
        "phase": one_of("extend", "decode", "verify", "draft", "encoder"),
        "kind": one_of("mha"),
        "dtype": one_of(dtype),
        "kv_dtype": one_of(dtype),
        "page_size": ANY,
        "spec_topk": ANY,
        "tree_windows": ANY,
        "sliding_window": ANY,
        "attention_chunk": ANY,
        "cross_attention": ANY,
        "logit_cap": ANY,
        "custom_mask": ANY,
        "multi_item": ANY,
        "strided_kv": ANY,
    }
    return Clause(**{**everywhere, **more})


_ON_CPU: dict[str, Condition] = {
    "vendor": one_of("cpu"),
    # Inductor vectorises its C++ for AVX2 and later, and gives no LSE, so no sinks either.
    "features": includes("cxx_compiler", "avx2"),
    "kind": one_of("mha", "mla"),
    "head_dim": ANY,
    "v_head_dim": ANY,
    "kv_lora_rank": ANY,
    "qk_rope_head_dim": ANY,
}
_ON_GPU: dict[str, Condition] = {
    "vendor": one_of("nvidia"),
    "version": versions(">=8.0"),
    "head_dim": between(16, 256),
    "v_head_dim": between(16, 256),
    "sinks": ANY,
    "lse": ANY,
}
_IN_GRAPHS: dict[str, Condition] = {
    **_ON_GPU,
    "graph": ANY,
    "page_size": multiple_of(16),
    "spec_topk": one_of(1),
    "tree_windows": NONE,
    "custom_mask": NONE,
    "multi_item": NONE,
}

FLEX_ATTENTION = BackendCard(
    name="flex_attention",
    summary="torch's compiled flex_attention: pages are read where they lie, masks are compiled in",
    factory="attnmux.cpu.flex_attention:FlexAttentionBackend",
    tree_masks=BackendCard.TREE_MASKS,
    requires=("torch>=2.11",),
    extra="torch",
    verified_on=(
        Verified(
            on="AMD EPYC with AVX-512-BF16",
            platform="cpu:x86_64",
            libraries=("torch 2.13.0+cpu",),
            date="2026-11-21",
            cases=279,
        ),
        _on_h200("2026-11-21", cases=419),
    ),
    sources={
        "features": "Inductor compiles C++, and vectorises it for AVX2 and later",
        "version": "bfloat16 begins at SM80; earlier devices were not tried",
        "dtype": "what the conformance suite runs",
        "kv_dtype": "K and V are read in the dtype of Q",
        "page_size": "in graphs: keys of other pages are gathered, and how many, no graph knows",
        "head_dim": "from 16 on, as `tl.dot` wants; above 256 nothing was tried",
        "v_head_dim": "as head_dim",
        "spec_topk": "in graphs: masks of trees are compiled in",
    },
    clauses=tuple(
        _flex(dtype, **{**where, **more})
        for where in (_ON_CPU, _ON_GPU, _IN_GRAPHS)
        for more in ({}, {**_ALIBI, "kind": one_of("mha")}, {**_RELATIVE, "kind": one_of("mha")})
        for dtype in _UNSCALED
    ),
    priors=(
        Prior(
            rank=60,
            when=Clause.when(vendor=one_of("cpu")),
            source="0.4 to 0.7 times the speed of torch_native, on an EPYC with AVX-512",
        ),
        Prior(rank=800, source="a general kernel, ranked after kernels made for paged KV"),
    ),
)


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [TORCH_NATIVE, NATIVE, FLEX_ATTENTION, TORCH_LINEAR]


@hookimpl
def attnmux_figures() -> list[Figures]:
    return Figures.in_folder(Path(__file__).parent / "figures")
