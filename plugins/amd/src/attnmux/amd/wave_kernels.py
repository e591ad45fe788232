"""Wave's templates of paged decode and extend, compiled for a layer's heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnmux.core.plugin import KernelLibrary

if TYPE_CHECKING:
    import torch

Compiled = Callable[..., Any]
"""A compiled kernel. It takes the arguments of its template in their order, without names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaveLang:
    """Names of `wave_lang.kernel.wave` that the adapter uses."""

    MMAType: Any
    AttentionShape: Callable[..., Any]
    paged_decode_attention_shape: Callable[..., Any]
    get_paged_decode_attention_kernels: Callable[..., Any]
    get_extend_attention_kernel: Callable[..., Any]
    get_default_scheduling_params: Callable[[], Any]
    WaveCompileOptions: Callable[..., Any]
    wave_compile: Callable[..., Compiled]


MODULES = (
    *("constraints", "compile", "compile_options", "utils.general_utils"),
    *("templates.attention_common", "templates.paged_decode_attention"),
    "templates.extend_attention",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """All that a kernel is compiled for."""

    target: str
    """The device's architecture, such as gfx942."""
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scaling: float
    logit_cap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WaveKernels:
    """Compiles the kernels of a layer. The first compilation of each takes seconds."""

    decode: Callable[[Heads, int], tuple[Compiled, Compiled]]
    """Kernels for heads and a number of splits S: attention to each part of the keys,
    `(q, k_buffer, v_buffer, kv_indptr, kv_indices, parts, parts_lse)`, and their merging,
    `(parts, parts_lse, kv_indptr, out)`. parts: [S, B, Hq, Dv] float32, parts_lse: [S, B, Hq]
    float32, in powers of 2. Requests without keys get NaN."""
    extend: Callable[[Heads, int], Compiled]
    """Kernel for heads and the longest context, by which a tile is chosen:
    `(q, k, v, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, max_extend_len, out)`.
    Queries see all cached keys, which `kv_indices` names, and new ones causally."""

    @classmethod
    def of(cls, lang: WaveLang) -> WaveKernels:
        return cls(
            decode=lambda heads, splits: _decode(lang, heads, splits),
            extend=lambda heads, longest: _extend(lang, heads, longest),
        )


PROVIDERS = {
    "wave-lang": lambda: WaveKernels.of(
        KernelLibrary.imported(WaveLang, *(f"wave_lang.kernel.wave.{name}" for name in MODULES))
    )
}


def _decode(lang: WaveLang, heads: Heads, splits: int) -> tuple[Compiled, Compiled]:
    shape = lang.paged_decode_attention_shape(
        num_query_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_dim,
        head_size_kv=heads.v_head_dim,
        block_size=1,
        num_seqs=1,  # dynamic
    )
    attend, merge, *parameters = lang.get_paged_decode_attention_kernels(
        shape,
        _matrix_units(lang),
        splits,
        input_dtype=heads.dtype,
        output_dtype=heads.dtype,
        layer_scaling=heads.scaling,
        logit_cap=heads.logit_cap,
    )
    of_attend, of_merge, dynamic_of_attend, dynamic_of_merge = parameters
    return (
        _compiled(lang, heads, attend, of_attend, dynamic_of_attend),
        _compiled(lang, heads, merge, of_merge, dynamic_of_merge),
    )


def _extend(lang: WaveLang, heads: Heads, longest: int) -> Compiled:
    q, k, v, out = (
        (1, number, dim)  # the first is dynamic
        for number, dim in (
            (heads.num_q_heads, heads.head_dim),
            (heads.num_kv_heads, heads.head_dim),
            (heads.num_kv_heads, heads.v_head_dim),
            (heads.num_q_heads, heads.v_head_dim),
        )
    )
    kernel, parameters, dynamic = lang.get_extend_attention_kernel(
        lang.AttentionShape(
            num_query_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_dim,
            head_size_kv=heads.v_head_dim,
            max_seq_len=longest,
        ),
        _matrix_units(lang),
        q_shape=q,
        k_shape=k,
        v_shape=v,
        k_cache_shape=k,
        v_cache_shape=v,
        o_shape=out,
        input_dtype=heads.dtype,
        output_dtype=heads.dtype,
        is_causal=True,
        # The templates divide by the square root of the head dim where they get no scaling.
        layer_scaling=heads.scaling,
        logit_cap=heads.logit_cap,
    )
    return _compiled(lang, heads, kernel, parameters, dynamic)


def _matrix_units(lang: WaveLang) -> tuple[Any, Any]:
    """For Q · K and P · V: the instruction's shape; the dtype is the operands'."""
    return (lang.MMAType.F32_16x16x16_F16,) * 2


def _compiled(
    lang: WaveLang, heads: Heads, kernel: object, parameters: dict[Any, Any], dynamic: list[Any]
) -> Compiled:
    options = lang.WaveCompileOptions(
        subs={**parameters, **lang.get_default_scheduling_params()},
        dynamic_symbols=dynamic,
        device="hip",
        target=heads.target,
        wave_runtime=True,  # launches on torch's current stream, so that graphs capture it
    )
    return lang.wave_compile(options, kernel)
