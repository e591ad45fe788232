"""Planned work of `mla_decode_fwd`: how amd-aiter 0.1.7.post2.dev18 shares keys, in plain torch.

- `get_mla_metadata_info_v1` gives the shapes of a plan, and `get_mla_metadata_v1` fills it on the
  device. Its fourth and third last tables come in the order of rocm_ops.hpp, not of their names in
  Python. The metadata are the addresses of two others.
- With 32, 48, … 112 heads, a request counts as several of 16 heads.
- Work: the request, where its part of the result goes (-1: to the result itself), its first and
  last query, its first and last key, how many keys follow, and nothing.
- Parts of one result are merged by their LSE.

Other parts than the real ones: each request has up to 3, of as many keys.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.library import Library

from attnmux.emulators.nvidia.dense import attend

COMPUTE_UNITS = 304
"""Compute units of an MI300X."""
RANK = 512
MOST_PARTS = 3
Shape = tuple[object, torch.dtype]


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: int,
    fast_mode: bool = True,
) -> tuple[Shape, ...]:
    """Shapes and dtypes: addresses, bounds of work, work, and three tables of the merge."""
    assert num_head_qo % 16 == 0
    if max_seqlen_qo != 1 or is_sparse or not fast_mode or num_head_qo not in range(32, 128, 16):
        raise NotImplementedError("another plan than the adapter's")
    tiles = batch_size * num_head_qo // 16
    parts = min(batch_size + COMPUTE_UNITS - 1, 2 * (COMPUTE_UNITS - 1)) * num_head_qo // 16
    return (
        (2, torch.uint64),
        (COMPUTE_UNITS + 1, torch.int32),
        ((tiles + COMPUTE_UNITS - 1, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (parts, torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_indptr: torch.Tensor,
    work_info: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
) -> None:
    """Raises RuntimeError for tables of other shapes, such as two in each other's place."""
    if not fast_mode or topk >= 0 or max_split_per_batch >= 0 or num_heads_k != 1:
        raise NotImplementedError("another plan than the adapter's")
    info, indptr = work_indptr, work_info  # what the library takes at these places
    bounds = seqlens_qo_indptr, seqlens_kv_indptr
    if any(each.dtype != torch.int32 or each.stride(0) != 1 for each in bounds):
        raise RuntimeError("seqlens_qo_indptr's and seqlens_kv_indptr's element type should be int")
    if info.dim() != 2 or info.shape[1] != 8 or indptr.shape != (COMPUTE_UNITS + 1,):
        raise RuntimeError("work is written beyond a table")
    if (max_seqlen_qo, uni_seqlen_qo) != (1, 1):
        raise RuntimeError("only supports (#head, uni_seqlen_qo) = (16*N, 1)")
    torch.ops.attnmux_aiter_emulated.plan(
        seqlens_kv_indptr,
        num_heads_per_head_k // 16,
        kv_granularity,
        work_metadata_ptrs,
        indptr,
        info,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
    )


def _plan(
    key_bounds: torch.Tensor,
    ratio: int,
    granule: int,
    metadata: torch.Tensor,
    indptr: torch.Tensor,
    info: torch.Tensor,
    reduce_indptr: torch.Tensor,
    final_map: torch.Tensor,
    partial_map: torch.Tensor,
) -> None:
    work: list[list[int]] = []
    partials: list[int] = []
    merges = [0]
    for request, (start, end) in enumerate(
        each for each in pairwise(key_bounds.tolist()) for _ in range(ratio)
    ):
        blocks = -(-(end - start) // granule)
        count = max(1, min(MOST_PARTS, blocks))
        firsts = [start + granule * (blocks * part // count) for part in range(count)] + [end]
        for first, last in pairwise(firsts):
            place = len(partials) if count > 1 else -1
            partials += [place] if count > 1 else []
            work.append([request, place, request, request + 1, first, last, end - last, 0])
        final_map[request] = torch.tensor([request, request + 1])
        merges.append(len(partials))
    assert len(work) <= len(info), "more parts than the emulator plans for"
    assert len(partials) <= len(partial_map), "more parts than the emulator plans for"
    info[: len(work)] = torch.tensor(work)
    partial_map[: len(partials)] = torch.tensor(partials, dtype=torch.int32)
    reduce_indptr[:] = torch.tensor(merges)
    shares = torch.arange(COMPUTE_UNITS + 1) * len(work)
    indptr[:] = (shares + COMPUTE_UNITS - 1).div(COMPUTE_UNITS, rounding_mode="floor")
    metadata.view(torch.int64)[:] = torch.tensor([indptr.data_ptr(), info.data_ptr()])


def _work(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    metadata: torch.Tensor,
    indptr: torch.Tensor,
    info: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
    o: torch.Tensor,
) -> None:
    """The results of all work; NaN for a request without keys."""
    if metadata.view(torch.int64).tolist() != [indptr.data_ptr(), info.data_ptr()]:
        raise RuntimeError("the metadata are addresses of another plan")
    for _, place, first, end, first_key, last_key, *_ in info[: int(indptr[-1])].tolist():
        rows = kv[slots[first_key:last_key].long()].float()
        keep = torch.ones(1, end - first, len(rows), dtype=torch.bool)
        found, own = attend(
            q[None, first:end].float(),
            rows[None],
            rows[None, ..., :RANK],
            keep,
            scale=float(scale),
            rounded_weights=None if q.dtype == torch.bfloat16 else (q.dtype, 1.0),
        )
        found = found[0] * factor if len(rows) else torch.full_like(found[0], torch.nan)
        if place < 0:
            o[first:end] = found
        else:
            parts[place, 0], lse[place, 0, :, 0] = found[0], own[0, 0]


def merge(
    parts: torch.Tensor,
    lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    final_map: torch.Tensor,
    partial_map: torch.Tensor,
    o: torch.Tensor,
) -> None:
    """`mla_reduce_v1`, without its LSE."""
    torch.ops.attnmux_aiter_emulated.merge(parts, lse, reduce_indptr, final_map, partial_map, o)


def _merge(
    parts: torch.Tensor,
    lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    final_map: torch.Tensor,
    partial_map: torch.Tensor,
    o: torch.Tensor,
) -> None:
    for tile, (first, last) in enumerate(pairwise(reduce_indptr.tolist())):
        if first < last:
            places = partial_map[first:last].long()
            weights = lse[places, 0].softmax(0)
            o[int(final_map[tile, 0])] = (weights * parts[places, 0]).sum(0)


def work(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    metadata: torch.Tensor,
    indptr: torch.Tensor,
    info: torch.Tensor,
    scale: float,
    parts: torch.Tensor,
    lse: torch.Tensor,
    o: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
) -> None:
    """`mla_decode_stage1_asm_fwd` with planned work: parts [P, 1, 16, 512] and their LSE, and `o`
    where a request has one part."""
    one = torch.ones(1)
    factor = one if kv_scale is None else kv_scale
    scales = scale * factor * (one if q_scale is None else q_scale)
    torch.ops.attnmux_aiter_emulated.work(
        q, kv[:, 0], slots, metadata, indptr, info, scales, factor, parts, lse, o
    )


library = Library("attnmux_aiter_emulated", "DEF")  # type: ignore[no-untyped-call]  # torch's
library.define(  # type: ignore[no-untyped-call]  # as above
    "plan(Tensor key_bounds, int ratio, int granule, Tensor(a!) metadata, Tensor(b!) indptr, "
    "Tensor(c!) info, Tensor(d!) reduce_indptr, Tensor(e!) final_map, Tensor(f!) partial_map) -> ()"
)
library.define(  # type: ignore[no-untyped-call]  # as above
    "work(Tensor q, Tensor kv, Tensor slots, Tensor metadata, Tensor indptr, Tensor info, "
    "Tensor scale, Tensor factor, Tensor(a!) parts, Tensor(b!) lse, Tensor(c!) o) -> ()"
)
library.define(  # type: ignore[no-untyped-call]  # as above
    "merge(Tensor parts, Tensor lse, Tensor reduce_indptr, Tensor final_map, Tensor partial_map, "
    "Tensor(a!) o) -> ()"
)
for name, function in {"plan": _plan, "work": _work, "merge": _merge}.items():
    library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]  # as above
