"""sgl-kernel-xpu's attention operators in plain torch, under their own schemas.

What an adapter can notice of the real ones, by their sources (version 0.11.0):

- `fwd` runs the kernels for decode where `max_seqlen_q` is 1, those for prefill where there is one
  request, and else both: decode takes the requests without two queries or more.
- The cap has no effect. The LSE is memory that no kernel writes.
- Sinks are read in the dtype of Q, and rows of Q end to end, whatever its strides.
- All pages that a request's keys reach are loaded. What lies after its keys gets weight 0, so that
  V has to be finite there. The result of a request without keys is not written.
- The store of `flash_mla_prefill` may go on to a multiple of 256 rows.
"""

from __future__ import annotations

import torch
from torch.library import Library

from attnmux.emulators.nvidia.dense import attend
from attnmux.intel import XPUKernels

SCHEMAS = {
    "fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "int max_seqlen_q, int max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, "
        "Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, "
        "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, "
        "Tensor? sinks, bool is_causal, int window_size_left, int window_size_right, "
        "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
        "int num_kv_splits, bool? pack_gqa, int sm_margin, Tensor(a!)? out=None) "
        "-> (Tensor(a!), Tensor, Tensor, Tensor)"
    ),
    "flash_mla_decode": (
        "(Tensor! out, Tensor! q_nope, Tensor! q_pe, Tensor! kv_c_and_k_pe_cache, "
        "Tensor! seq_lens, Tensor! page_table, Tensor! workspace, float sm_scale, "
        "int num_kv_splits) -> ()"
    ),
    "flash_mla_prefill": (
        "(Tensor! out, Tensor! q_nope, Tensor! q_pe, Tensor! kv_c_and_k_pe_cache, "
        "Tensor! cu_seqlens_q, Tensor! seq_lens, int max_seqlen_q, Tensor! page_table, "
        "Tensor! workspace, float sm_scale, bool causal, int num_kv_splits) -> ()"
    ),
    "flash_mla_get_workspace_size": "(int _0, int _1, int _2, int _3, int _4) -> int _0",
}
"""Schemas that src/torch_extension_sycl.cc registers; torch infers the last one from its
function."""

HEAD_DIMS, PAGES, LATENT_PAGES = (64, 96, 128, 192, 256, 512), (64, 128), (16, 32, 64, 128)
LATENT, ROPE, TILE = 512, 64, 256


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(message)


def _fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    page_table: torch.Tensor | None,
    kv_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    seqlens_rotary: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    softmax_scale: float,
    sinks: torch.Tensor | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    scheduler_metadata: torch.Tensor | None,
    num_kv_splits: int,
    pack_gqa: bool | None,
    sm_margin: int,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rotary = (rotary_cos, rotary_sin, seqlens_rotary)
    absent = (q_v, kv_batch_idx, leftpad_k, *rotary, q_descale, k_descale, v_descale)
    _check(all(each is None for each in (*absent, scheduler_metadata)), "not emulated")
    if page_table is None:
        raise RuntimeError("not emulated: keys without pages")
    _check_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table)
    if sinks is not None:
        _check(q.shape[2] == 64, f"sink is only supported for head_size == 64, got {q.shape[2]}")
        _check(sinks.dtype == q.dtype, "sinks were read as numbers of q's dtype")
    if out is None:
        out = torch.full_like(q, torch.nan)
    _check(out.shape == q.shape and out.dtype == q.dtype, "out shape must be that of q")
    _check(out.stride(-1) == 1, "out must have a contiguous last dimension")
    new = cu_seqlens_q.diff().tolist()
    _check(max(new) <= max_seqlen_q, "max_seqlen_q is less than a request's queries")
    prefills = len(new) == 1 and max_seqlen_q > 1
    first = 0
    for row, queries, length in zip(page_table, new, cu_seqlens_k.tolist(), strict=True):
        rows = slice(first, first := first + queries)
        decodes = queries < 2 and not prefills
        _check(queries == 1 or not decodes, "the next request's first row was written over")
        _check(not decodes or length <= max_seqlen_k, "max_seqlen_k is less than a request's keys")
        pages = row[: -(-length // k.shape[1])].long()
        _check(len(pages) * k.shape[1] >= length, "the page table is too narrow")
        if not queries:
            continue
        causal = is_causal or decodes
        right = 0 if causal else window_size_right
        keep = visible(len(pages) * k.shape[1], queries, length, window_size_left, right)
        if not length:
            out[rows] = torch.nan
            continue
        result, _ = attend(
            q[rows].unsqueeze(0),
            k[pages].flatten(0, 1).unsqueeze(0),
            v[pages].flatten(0, 1).unsqueeze(0),
            keep.unsqueeze(0),
            scale=softmax_scale,
            sinks=sinks,
        )
        out[rows] = result[0].to(out.dtype)
    lse = q.new_full((q.shape[1], len(q)), torch.nan, dtype=torch.float32)
    return out, lse, lse.new_zeros(0), lse.new_zeros(0)


def visible(loaded: int, queries: int, length: int, left: int, right: int) -> torch.Tensor:
    """[queries, loaded] bool: keys of the window, from the end of the keys; -1 is no bound."""
    key = torch.arange(loaded)
    ends = torch.arange(length - queries, length).unsqueeze(1)
    keep = (key < length).expand(queries, -1)
    if right >= 0:
        keep = keep & (key <= ends + right)
    return keep & (key >= ends - left) if left >= 0 else keep


def _check_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    _check(q.dtype in (torch.bfloat16, torch.float16), "mha_fwd only supports Half and BFloat16")
    _check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    _check(q.dim() == 3, "query must be in ragged format (total_q, h, d)")
    _check(q.is_contiguous(), "rows of q are read end to end")
    _check(k.stride(-1) == v.stride(-1) == 1, "must have a contiguous last dimension")
    _check(page_table.dtype == torch.int32, "page_table must have dtype torch.int32")
    _check(page_table.stride(-1) == 1, "page_table must have contiguous last dimension")
    for lens in (cu_seqlens_q, cu_seqlens_k):
        _check(lens.dtype == torch.int32 and lens.is_contiguous(), "lengths are int32")
    size = len(cu_seqlens_q) - 1
    _check(len(page_table) == size == len(cu_seqlens_k), "batch_size must equal batch_size_k")
    heads, dim = q.shape[1:]
    _check(k.shape == v.shape and k.shape[3] == dim, "shapes of k and v")
    _check(dim in HEAD_DIMS, f"Unsupported head size for paged attention: {dim}")
    _check(k.shape[1] in PAGES, f"Unsupported page size for decode attention: {k.shape[1]}")
    _check(heads % k.shape[2] == 0 and heads // k.shape[2] <= 16, "Unsupported q_group_size")


def _check_latents(cache: torch.Tensor, table: torch.Tensor, *others: torch.Tensor) -> None:
    for tensor in (cache, table, *others):
        _check(tensor.is_contiguous(), "must be contiguous")
    page_size = cache.shape[1]
    _check(page_size in LATENT_PAGES, f"Unsupported page size for MLA: {page_size}")
    _check(cache.shape[2] == LATENT + ROPE, "rows of 512 and 64")
    _check(cache.dtype in (torch.bfloat16, torch.float16), "Unsupported input data type for MLA")
    _check(table.dtype == torch.int32, "page_table.dtype needs to be int32")
    _check(table.shape[1] > 0 and table.shape[1] * page_size % 128 == 0, "block num")


def _attend_latents(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    row: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """Causal from the end of the keys. q_nope: [n, H, 512]."""
    pages = row[: -(-length // cache.shape[1])].long()
    _check(len(pages) * cache.shape[1] >= length, "the page table is too narrow")
    keys = cache[pages].flatten(0, 1).view(1, -1, 1, LATENT + ROPE)
    ends = torch.arange(length - len(q_nope), length).unsqueeze(1)
    keep = (torch.arange(keys.shape[1]) <= ends).unsqueeze(0)
    q = torch.cat([q_nope, q_pe], dim=-1).unsqueeze(0)
    return attend(q, keys, keys[..., :LATENT], keep, scale=scale)[0][0].to(q_nope.dtype)


def _workspace_size(
    max_seq_len: int, num_batches: int, num_heads: int, page_size: int, num_kv_splits: int
) -> int:
    splits = num_kv_splits if num_kv_splits > 0 else -(-max_seq_len // 128)
    return 0 if splits == 1 else 4 * (LATENT + 2) * splits * num_heads * num_batches


def _decode(
    out: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int,
) -> None:
    cache = kv_c_and_k_pe_cache
    _check_latents(cache, page_table, out, q_nope, q_pe, seq_lens, workspace)
    size, heads, _ = q_nope.shape
    _check(heads <= 128, f"H must be <= 128, but got {heads}")
    _check(q_nope.shape[2] == LATENT and q_pe.shape == (size, heads, ROPE), "dims of q")
    _check(q_nope.dtype == q_pe.dtype == cache.dtype == out.dtype, "dtypes differ")
    _check(out.shape == q_nope.shape and len(page_table) == size == len(seq_lens), "shapes")
    _check(seq_lens.dtype == torch.int32, "seq_lens.dtype needs to be int32")
    longest, page_size = page_table.shape[1] * cache.shape[1], cache.shape[1]
    needed = _workspace_size(longest, size, heads, page_size, num_kv_splits)
    _check(workspace.numel() * workspace.element_size() >= needed, "illegal memory access")
    workspace.fill_(255)
    for index, length in enumerate(seq_lens.tolist()):
        out[index] = torch.nan
        if length:
            one = slice(index, index + 1)
            row = page_table[index]
            out[one] = _attend_latents(q_nope[one], q_pe[one], cache, row, length, sm_scale)


def _prefill(
    out: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    causal: bool,
    num_kv_splits: int,
) -> None:
    cache = kv_c_and_k_pe_cache
    _check_latents(cache, page_table, out, q_nope, q_pe, cu_seqlens_q, seq_lens, workspace)
    _check(num_kv_splits <= 1, "Manual KV splits are not supported yet.")
    _check(causal, "Non-causal MLA prefill is not supported yet.")
    _check(q_nope.dtype == q_pe.dtype == cache.dtype == out.dtype, "dtypes differ")
    _check(cu_seqlens_q.dtype == seq_lens.dtype == torch.int32, "lengths are int32")
    total, heads, _ = q_nope.shape
    _check(q_nope.shape[2] == LATENT and q_pe.shape == (total, heads, ROPE), "dims of q")
    _check(len(out) >= -(-total // TILE) * TILE, "a store went beyond out: device lost")
    new = cu_seqlens_q.diff().tolist()
    _check(len(new) == len(seq_lens) == len(page_table), "one length for each request")
    _check(max(new) <= max_seqlen_q, "max_seqlen_q is less than a request's queries")
    keys = page_table.shape[1] * cache.shape[1]
    is_large = max_seqlen_q >= 512 and keys >= 1024 and max_seqlen_q % TILE == 0
    _check(not is_large or all(each % TILE == 0 for each in new), "a partial tile: device lost")
    first = 0
    for row, queries, length in zip(page_table, new, seq_lens.tolist(), strict=True):
        rows = slice(first, first := first + queries)
        if queries:
            out[rows] = _attend_latents(q_nope[rows], q_pe[rows], cache, row, length, sm_scale)
    out[total:] = torch.nan


OPERATORS = {
    "fwd": (_fwd, "CPU"),
    "flash_mla_decode": (_decode, "CPU"),
    "flash_mla_prefill": (_prefill, "CPU"),
    "flash_mla_get_workspace_size": (_workspace_size, "CompositeExplicitAutograd"),
}

library = Library("attnmux_xpu_emulated", "DEF")  # type: ignore[no-untyped-call]  # torch's
for name, (function, key) in OPERATORS.items():
    library.define(name + SCHEMAS[name])  # type: ignore[no-untyped-call]  # torch's
    library.impl(name, function, key)  # type: ignore[no-untyped-call]  # torch's

KERNELS = XPUKernels(
    fwd=torch.ops.attnmux_xpu_emulated.fwd,
    flash_mla_decode=torch.ops.attnmux_xpu_emulated.flash_mla_decode,
    flash_mla_prefill=torch.ops.attnmux_xpu_emulated.flash_mla_prefill,
    flash_mla_get_workspace_size=torch.ops.attnmux_xpu_emulated.flash_mla_get_workspace_size,
)
