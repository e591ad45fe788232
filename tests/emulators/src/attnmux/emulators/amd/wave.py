"""Wave's templates and compiler in plain torch.

A template returns what its kernel was asked for; "compiling" it for an AMD device gives a function
that takes the kernel's arguments in their order, checks them, and computes in float32 by an
operator of torch, so that recorded steps can be replayed. It reads nothing that the kernel leaves
unread, and leaves NaN where the kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.library import Library

from attnmux.amd import WaveKernels, WaveLang

TARGETS = ("gfx942", "gfx950")
MATRIX_UNIT = "F32_16x16x16_F16"
LOG2_E = math.log2(math.e)
SCHEMAS = {
    "decode": (
        "(Tensor q, Tensor k, Tensor v, Tensor request_indices, Tensor kv_indices, "
        "Tensor(a!) output, Tensor(b!) output_max, float scaling, float cap) -> ()"
    ),
    "merge": "(Tensor logits, Tensor logits_max, Tensor request_indices, Tensor(a!) output) -> ()",
    "extend": (
        "(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, "
        "Tensor kv_indptr, Tensor kv_indices, int most, Tensor(a!) c, float scaling, float cap) "
        "-> ()"
    ),
}
"""Schemas of the operators that compute."""


class DecodeShape(NamedTuple):
    """`paged_decode_attention_shape`."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    head_size_kv: int
    block_size: int
    num_seqs: int


@dataclass(frozen=True)
class AttentionShape:
    """The fields of the package's class that extend reads."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    head_size_kv: int
    max_seq_len: int | None = None
    block_size: int | None = None


@dataclass(kw_only=True)
class CompileOptions:
    """The fields of `WaveCompileOptions` that the adapter sets."""

    subs: dict[Any, Any]
    dynamic_symbols: Sequence[str] = ()
    device: str = "hip"
    target: str = "gfx942"
    wave_runtime: bool = False


@dataclass(frozen=True, kw_only=True)
class Template:
    """A kernel that was asked for and not compiled."""

    run: Callable[..., None]
    dynamic: tuple[str, ...]
    substituted: frozenset[str] = field(default=frozenset({"HEADS"}))


def decode_kernels(
    shape: DecodeShape,
    mfma_variant: tuple[str, str],
    num_kv_splits: int,
    input_dtype: torch.dtype = torch.float16,
    output_dtype: torch.dtype = torch.float16,
    layer_scaling: float | None = None,
    logit_cap: float = 0.0,
) -> tuple[Any, ...]:
    """`get_paged_decode_attention_kernels`."""
    _check_units(mfma_variant)
    scaling = layer_scaling or 1 / math.sqrt(shape.head_size)
    attend = partial(_decode, shape, num_kv_splits, input_dtype, scaling, logit_cap)
    merge = partial(_merge, shape, num_kv_splits, output_dtype)
    first, second = ("K2", "N_KV", "S"), ("S",)
    subs = {"HEADS": shape.num_query_heads}
    kernels = Template(run=attend, dynamic=first), Template(run=merge, dynamic=second)
    return *kernels, subs, dict(subs), list(first), list(second)


def extend_kernel(
    shape: AttentionShape,
    mfma_variant: tuple[str, str],
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    k_cache_shape: tuple[int, ...],
    v_cache_shape: tuple[int, ...],
    o_shape: tuple[int, ...],
    input_dtype: torch.dtype = torch.float16,
    output_dtype: torch.dtype = torch.float32,
    size_dtype: torch.dtype = torch.int32,
    is_causal: bool = False,
    logit_cap: float = 0.0,
    layer_scaling: float | None = None,
    num_waves: int = 4,
    use_custom_mask: bool = False,
) -> tuple[Any, ...]:
    """`get_extend_attention_kernel`, without masks."""
    _check_units(mfma_variant)
    if not is_causal or use_custom_mask:
        raise NotImplementedError("the emulator has the causal kernel alone")
    if shape.block_size is None and shape.max_seq_len is None:
        raise TypeError("'<=' not supported between instances of 'NoneType' and 'int'")
    rows = q_shape, k_shape, v_shape, k_cache_shape, v_cache_shape, o_shape
    scaling = layer_scaling or 1 / math.sqrt(shape.head_size)
    run = partial(_extend, shape, rows, (input_dtype, output_dtype), scaling, logit_cap)
    dynamic = ("N_Q", "N_KV", "S")
    return Template(run=run, dynamic=dynamic), {"HEADS": shape.num_query_heads}, list(dynamic)


def wave_compile(options: CompileOptions, kernel: Template) -> Callable[..., None]:
    """A function of the kernel's arguments. Raises ValueError for another kind of device, and where
    the template's symbols are not substituted or not dynamic."""
    if not options.wave_runtime:
        raise ValueError("IREE would launch on a stream that torch does not know")
    if options.device != "hip" or options.target not in TARGETS:
        raise ValueError(f"{options.device} {options.target}: the matrix units are gfx942's")
    if tuple(options.dynamic_symbols) != kernel.dynamic:
        raise ValueError(f"dynamic symbols {options.dynamic_symbols} for {kernel.dynamic}")
    missing = (kernel.substituted | {"SCHEDULING"}) - options.subs.keys()
    if missing:
        raise ValueError(f"no substitution of {sorted(missing)}")
    return kernel.run


def _decode(
    shape: DecodeShape,
    splits: int,
    dtype: torch.dtype,
    scaling: float,
    cap: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request_indices: torch.Tensor,
    kv_indices: torch.Tensor,
    output: torch.Tensor,
    output_max: torch.Tensor,
) -> None:
    _check_rows(q, (shape.num_query_heads, shape.head_size), dtype)
    _check_rows(k, (shape.num_kv_heads, shape.head_size), dtype)
    _check_rows(v, (shape.num_kv_heads, shape.head_size_kv), dtype)
    _check_index(request_indices, len(q) + 1)
    _check_index(kv_indices)
    heads = splits, len(q), shape.num_query_heads
    _check_exactly(output, (*heads, shape.head_size_kv), torch.float32)
    _check_exactly(output_max, heads, torch.float32)
    torch.ops.attnmux_wave.decode(
        q, k, v, request_indices, kv_indices, output, output_max, scaling, cap
    )


def _run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request_indices: torch.Tensor,
    kv_indices: torch.Tensor,
    output: torch.Tensor,
    output_max: torch.Tensor,
    scaling: float,
    cap: float,
) -> None:
    splits, starts = len(output), request_indices.tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        each = -(-(end - start) // splits)
        for part in range(splits):
            slots = kv_indices[min(start + part * each, end) : min(start + (part + 1) * each, end)]
            rows, logits = _logits(q[number : number + 1], k, v, slots, scaling, cap)
            output_max[part, number] = (torch.logsumexp(logits, -1) * LOG2_E)[:, 0]
            if not len(slots):
                output[part, number], output_max[part, number] = 0.0, -1e6
                continue
            weights = torch.softmax(logits, -1).to(q.dtype).float()
            output[part, number] = torch.einsum("hqk,khd->qhd", weights, rows)[0]


def _merge(
    shape: DecodeShape,
    splits: int,
    dtype: torch.dtype,
    logits: torch.Tensor,
    logits_max: torch.Tensor,
    request_indices: torch.Tensor,
    output: torch.Tensor,
) -> None:
    requests = logits.shape[1]
    _check_exactly(logits, (splits, requests, *_of_out(shape)), torch.float32)
    _check_exactly(logits_max, (splits, requests, shape.num_query_heads), torch.float32)
    _check_exactly(output, (requests, *_of_out(shape)), dtype)
    _check_index(request_indices, requests + 1)
    torch.ops.attnmux_wave.merge(logits, logits_max, request_indices, output)


def _run_merge(
    logits: torch.Tensor,
    logits_max: torch.Tensor,
    request_indices: torch.Tensor,
    output: torch.Tensor,
) -> None:
    splits = len(logits)
    for number, length in enumerate(request_indices.diff().tolist()):
        active = min(length, splits)  # one key a split at least: the others are not read
        if not active:
            output[number] = math.nan
            continue
        weights = torch.softmax(logits_max[:active, number] / LOG2_E, 0).unsqueeze(-1)
        output[number] = (weights * logits[:active, number]).sum(0)


def _extend(
    shape: AttentionShape,
    rows: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    scaling: float,
    cap: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    max_extend_len: int,
    c: torch.Tensor,
) -> None:
    for tensor, expected in zip((q, k, v, k_cache, v_cache), rows, strict=False):
        _check_rows(tensor, expected[1:], dtypes[0])
    _check_rows(c, rows[5][1:], dtypes[1])
    _check_index(qo_indptr)
    _check_index(kv_indptr, len(qo_indptr))
    _check_index(kv_indices)
    tile = shape.block_size or (64 if (shape.max_seq_len or 0) <= 128 else 128)
    # Workgroups cover so many new tokens and no more
    most = -(-max_extend_len // tile) * tile
    torch.ops.attnmux_wave.extend(
        q, k, v, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, most, c, scaling, cap
    )


def _run_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    most: int,
    c: torch.Tensor,
    scaling: float,
    cap: float,
) -> None:
    bounds, cached = qo_indptr.tolist(), kv_indptr.tolist()
    for request in range(len(bounds) - 1):
        new = min(bounds[request + 1] - bounds[request], most)
        own = torch.arange(bounds[request], bounds[request] + new)
        slots = kv_indices[cached[request] : cached[request + 1]]
        keys = torch.cat([k_cache[slots.long()], k[own]])
        values = torch.cat([v_cache[slots.long()], v[own]])
        every = torch.arange(len(keys))
        read, logits = _logits(q[own], keys, values, every, scaling, cap)
        seen = every <= (torch.arange(new) + len(slots)).unsqueeze(-1)
        logits = logits.masked_fill(~seen, -math.inf)
        weights = torch.softmax(logits, -1).to(q.dtype).float()
        c[own] = torch.einsum("hqk,khd->qhd", weights, read).to(c.dtype)


def _logits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V [n, Hq, Dv] and logits [Hq, queries, n], float32."""
    group = q.shape[1] // k.shape[1]
    keys = k[slots.long()].float().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * scaling
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return v[slots.long()].float().repeat_interleave(group, 1), logits


def _of_out(shape: DecodeShape) -> tuple[int, int]:
    return shape.num_query_heads, shape.head_size_kv


def _check_units(mfma_variant: tuple[str, str]) -> None:
    if mfma_variant != (MATRIX_UNIT, MATRIX_UNIT):
        raise ValueError(f"no kernel for {mfma_variant}")


def _check_rows(tensor: torch.Tensor, expected: Sequence[int], dtype: torch.dtype) -> None:
    _check_exactly(tensor, (len(tensor), *expected), dtype)


def _check_exactly(tensor: torch.Tensor, expected: Sequence[int], dtype: torch.dtype) -> None:
    got = tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()
    if got != (tuple(expected), dtype, True):
        raise ValueError(f"a kernel for {tuple(expected)} of {dtype}, contiguous, got {got}")


def _check_index(tensor: torch.Tensor, length: int | None = None) -> None:
    if tensor.dtype != torch.int32 or (length is not None and len(tensor) != length):
        raise ValueError(f"indices of {tensor.dtype} and length {len(tensor)}")


LANG = WaveLang(
    MMAType=SimpleNamespace(F32_16x16x16_F16=MATRIX_UNIT),
    AttentionShape=AttentionShape,
    paged_decode_attention_shape=DecodeShape,
    get_paged_decode_attention_kernels=decode_kernels,
    get_extend_attention_kernel=extend_kernel,
    get_default_scheduling_params=lambda: {"SCHEDULING": 1},
    WaveCompileOptions=CompileOptions,
    wave_compile=wave_compile,
)
KERNELS = WaveKernels.of(LANG)


def _register() -> Library:
    library = Library("attnmux_wave", "DEF")  # type: ignore[no-untyped-call]  # torch's
    functions = {"decode": _run_decode, "merge": _run_merge, "extend": _run_extend}
    for name, function in functions.items():
        library.define(name + SCHEMAS[name])  # type: ignore[no-untyped-call]  # torch's
        library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]  # torch's
    return library


OPERATORS = _register()
"""Registered as long as it lives."""
