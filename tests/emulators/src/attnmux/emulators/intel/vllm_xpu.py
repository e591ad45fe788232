"""vllm-xpu-kernels' operator in plain torch, below the package's own Python.

`varlen_fwd` is registered for CPUs in the library's namespace, under its schema, so that
`flash_attn_varlen_func` of the installed package runs unchanged. What an adapter can notice of the
real one, by its source (0.1.13) and the symbols of the wheel (0.1.16.2):

- A step whose longest request has one query runs the kernel for decode, which splits keys by the
  size of the batch unless it is told how often. Others run the kernel for prefill on requests of
  two queries or more, and that for decode on the rest.
- A cap and slopes have no effect.
- Only some shapes have kernels. The real operator's error for others lets the package's Python go
  on in plain torch; here it has other words, so that a test fails.
- Lengths are read as int32, and sinks in the dtype of Q.
- All pages that a request's keys reach are loaded. What lies after its keys gets weight 0, so that
  V has to be finite there. The result of a request without keys is not written.
"""

from __future__ import annotations

import math

import torch
from torch.library import Library

from attnmux.core.plugin import KernelLibrary
from attnmux.emulators.intel.xpu import visible
from attnmux.emulators.nvidia.dense import attend
from attnmux.intel import VLLMXPUKernels

SCHEMA = (
    "varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, "
    "Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, float p_dropout, Tensor? q_scale, "
    "Tensor? k_scale, Tensor? v_scale, float softmax_scale, Tensor? softmax_sink, "
    "bool zero_tensors, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool return_softmax, Generator? gen, int? num_splits, bool mix_batch, "
    "Tensor? splits_per_seq, Tensor? work_list) -> Tensor[]"
)
"""A string of `_vllm_fa2_C.abi3.so`, version 0.1.16.2."""

TILE, XE_CORES = 64, 20
PREFILL = {
    (64, False, False),
    (64, False, True),
    (64, True, False),
    (64, True, True),
    (96, False, False),
    (96, True, False),
    (128, False, False),
    (128, False, True),
    (128, True, False),
    (128, True, True),
    (192, False, False),
    (256, False, False),
    (256, True, False),
    (512, False, False),
}
"""Causal kernels over pages: dim, window, sinks."""
DECODE = {
    8: {
        (64, False, False),
        (64, False, True),
        (64, True, False),
        (64, True, True),
        (96, False, False),
        (96, True, False),
        (128, False, False),
        (128, False, True),
        (128, True, False),
        (192, False, False),
        (256, False, False),
        (256, True, False),
        (512, False, False),
    },
    16: {(64, False, False), (128, False, False), (128, True, False), (256, False, False)},
}
"""By query heads a KV head, for pages that are multiples of 64."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(message)


def _varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    softmax_scale: float,
    softmax_sink: torch.Tensor | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None,
    num_splits: int | None,
    mix_batch: bool,
    splits_per_seq: torch.Tensor | None,
    work_list: torch.Tensor | None,
) -> list[torch.Tensor]:
    if block_table is None or seqused_k is None or out is None:
        raise RuntimeError("not emulated: keys without pages, or no out")
    absent = (leftpad_k, q_scale, k_scale, v_scale, splits_per_seq, work_list)
    _check(all(each is None for each in absent) and not return_softmax, "not emulated")
    _check(mix_batch or max_seqlen_q == 1, "not emulated: prefill of single queries")
    _check_tensors(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    _check(softmax_sink is None or softmax_sink.dtype == q.dtype, "sinks were read in q's dtype")
    new, lens = cu_seqlens_q.diff().tolist(), seqused_k.tolist()
    _check(max(new) <= max_seqlen_q, "max_seqlen_q is less than a request's queries")
    window, splits = window_size_left != -1, 1
    shape = (q.shape[2], window, softmax_sink is not None)
    decodes_all = max_seqlen_q == 1
    if decodes_all:
        longest = min(max_seqlen_k, window_size_left + 1) if window else max_seqlen_k
        splits = num_splits or _splits(len(new), q.shape[1], k.shape[2], longest)
    else:
        _check(is_causal, "not emulated: keys after a query")
        _check(shape in PREFILL, f"no kernel for prefill of {shape}")
    group = q.shape[1] // k.shape[2]
    _check(group <= 16 and shape in DECODE[8 if group <= 8 else 16], f"no kernel: {shape}, {group}")
    first = 0
    for row, queries, length in zip(block_table, new, lens, strict=True):
        rows = slice(first, first := first + queries)
        _check(queries > 0, "the next request's first row was written over")
        _check(queries > 1 or length <= max_seqlen_k, "max_seqlen_k is less than a request's keys")
        pages = row[: -(-length // k.shape[1])].long()
        _check(len(pages) * k.shape[1] >= length, "the page table is too narrow")
        if not length:
            out[rows] = torch.nan
            continue
        keep = visible(len(pages) * k.shape[1], queries, length, window_size_left, 0)
        loaded = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
        out[rows] = _in_parts(q[rows], *loaded, keep, splits, softmax_scale, softmax_sink)
    return [out, q.new_empty(0)]


def _in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    splits: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[n, Hq, D]. The parts' results have the dtype of Q, as the kernel stores them."""
    each = math.ceil(keep.shape[1] / TILE / splits) * TILE
    outs, weights = [], []
    for start in range(0, keep.shape[1], each):
        part = slice(start, start + each)
        out, lse = attend(
            q.unsqueeze(0), k[None, part], v[None, part], keep[None, :, part], scale=scale
        )
        outs.append(out[0].to(q.dtype).float())
        weights.append(lse[0])
    logits = torch.stack(weights)
    total = logits if sinks is None else torch.cat([logits, sinks.float().expand(1, *q.shape[:2])])
    shares = torch.exp(logits - total.logsumexp(0))
    return (torch.stack(outs) * shares.unsqueeze(-1)).sum(0).to(q.dtype)


def _splits(requests: int, heads: int, kv_heads: int, longest: int) -> int:
    """The number of splits of keys by `get_num_splits` of flash_api.cpp, for pages of 64."""
    tiles = -(-longest // TILE)
    work = requests * kv_heads
    if tiles < 16 or (work >= XE_CORES and tiles < 64):
        return 1
    wanted = max(-(-4 * XE_CORES // work), tiles // 12)
    return max(1, min(wanted, max(2, 128 * XE_CORES // (requests * heads)), tiles // 4, 32))


def _check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    _check(q.dtype in (torch.bfloat16, torch.float16), "only supports fp16, bf16, and fp8")
    _check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    _check(q.dim() == 3, "query must be in ragged format")
    for tensor in (q, k, v, block_table):
        _check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    for tensor in (q, k, v):
        strides = [stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]]
        _check(not any(strides) and tensor.data_ptr() % 16 == 0, "16-byte aligned")
    _check(out.shape == q.shape and out.dtype == q.dtype, "out is not as q is")
    _check(out.is_contiguous() and out.data_ptr() % 16 == 0, "out is written end to end")
    for lens in (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
        _check(lens.dtype == torch.int32, "lengths and tables are read as int32")
    for lens in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        _check(lens.is_contiguous(), "cu_seqlens must be contiguous")
    _check(len(block_table) == len(cu_seqlens_q) - 1 == len(seqused_k), "one row a request")
    _check(k.shape == v.shape and k.shape[3] == q.shape[2], "shapes of k and v")
    _check(k.shape[1] % 64 == 0, f"Unsupported page size for fmha: {k.shape[1]}")
    page_rows = {tensor.stride(0) / tensor.stride(1) for tensor in (k, v)}
    _check(len(page_rows) == 1, "Paged K/V page strides must match in sequence-position units")


# Before the operator is looked for: where the package's own library loads, it defines it.
KERNELS = KernelLibrary.imported(VLLMXPUKernels, "vllm_xpu_kernels.flash_attn_interface")

library = Library("_vllm_fa2_C", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
if not hasattr(torch.ops._vllm_fa2_C, "varlen_fwd"):
    library.define(SCHEMA)  # type: ignore[no-untyped-call]  # torch's
library.impl("varlen_fwd", _varlen_fwd, "CPU")  # type: ignore[no-untyped-call]  # torch's
