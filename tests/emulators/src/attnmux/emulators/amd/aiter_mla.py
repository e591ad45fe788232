"""`mla_decode_fwd` and `mla_prefill_fwd` of amd-aiter 0.1.7.post2.dev18, in plain torch.

What the real functions do with their arguments, as far as an adapter can notice:

- Q is [T, H, 576], end to end; the cache is [slots, 1, 1, 576], of whose rows the first 512 are V.
  H is 16 or 128, or another multiple of 16 with planned work (`aiter_mla_work.py`). Q and the cache
  are in bf16, or both in e4m3 with a scale of one value each.
- `o` is bf16, end to end; a request without keys gets NaN, for 0 / 0.
- The kernel reads 32 bits of a slot or a bound.
- The number of parts lies in a tensor that `get_meta_param` keeps until it is called with other
  arguments. A launch reads it.
- Over e4m3 at most as many parts as there are blocks of keys: 0 for fewer keys than requests, which
  is an error.
- What is returned holds no LSE: without planned work nothing writes it.
- Q's requests lie `max_seqlen_q` rows apart in decode, so that all have as many. A query sees the
  keys up to its own, the last one all of them. So does prefill's, over a prefix too, as a test of
  SGLang has it (aiter_mla, prompts cut in zigzag), and AITER's own without one.
- Prefill takes any number of queries of each request, in bf16 alone.

Not known, since the code is assembly: whether a tile's rest loads rows of no key, with weight 0, as
some of AITER's later kernels did (ROCm/aiter, pull request 4245). The emulator loads none.

Shapes are static and nothing is read on the host.
"""

from __future__ import annotations

import functools

import torch

from attnmux.emulators.amd.aiter_mla_work import (
    get_mla_metadata_info_v1 as get_mla_metadata_info_v1,
)
from attnmux.emulators.amd.aiter_mla_work import get_mla_metadata_v1 as get_mla_metadata_v1
from attnmux.emulators.amd.aiter_mla_work import merge, work
from attnmux.emulators.nvidia.dense import attend, padded, unpadded

COMPUTE_UNITS, MOST_PARTS = 304, 16
"""Compute units of an MI300X, and most parts of `get_meta_param`."""
FP8 = (torch.float8_e4m3fnuz, torch.float8_e4m3fn)
BLOCKS = {16: (64, 128), 128: (16, 32)}
"""By heads: the keys that a part has at least, where keys are merged and over e4m3."""
RANK = 512


@functools.lru_cache(maxsize=1)
def get_meta_param(
    num_kv_splits: int | None,
    bs: int,
    total_kv: int,
    nhead: int,
    max_seqlen_q: int,
    dtype: torch.dtype,
) -> tuple[int, int, torch.Tensor]:
    """The parts of a request's keys, the keys of one at least, and [bs + 1] int32 sums of parts.

    Raises AssertionError for heads that the library refuses.
    """
    assert nhead in BLOCKS, f"nhead={nhead} not supported"
    least, in_8_bits = BLOCKS[nhead]
    parts = num_kv_splits or min(MOST_PARTS, max(1, COMPUTE_UNITS // bs))
    if dtype in FP8:
        parts = min(parts, (total_kv // bs + in_8_bits - 1) // in_8_bits)
    return parts, least, torch.arange(0, (bs + 1) * parts, parts, dtype=torch.int32)


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: torch.Tensor | None = None,
    work_meta_data: torch.Tensor | None = None,
    work_indptr: torch.Tensor | None = None,
    work_info_set: torch.Tensor | None = None,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write [T, H, 512] to `o`. Returns memory that holds nothing of use.

    Raises AssertionError and RuntimeError for what the library refuses or would misread, and
    NotImplementedError for what the emulator does not have.
    """
    assert logit_cap <= 0, f"logit_cap={logit_cap} is not support yet"
    _, page_size, _, head_dim = kv_buffer.shape
    if page_size != 1:
        raise NotImplementedError("pages")
    bs, (num_rows, heads, _) = len(qo_indptr) - 1, o.shape
    scale: float | torch.Tensor = head_dim**-0.5 if sm_scale is None else sm_scale
    if work_meta_data is not None:
        _check_launch(q, kv_buffer, o, (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens))
        _check_dtypes(q, kv_buffer, q_scale, kv_scale)
        assert heads in range(32, 128, 16), f"nhead={heads} and {max_seqlen_q} not supported"
        assert max_seqlen_q == 1, f"nhead={heads} and {max_seqlen_q} not supported"
        tables = (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
        of_keys = kv_buffer, kv_indices, work_meta_data
        return _planned(q, o, of_keys, tables, scale, (q_scale, kv_scale))
    # By position, as the library does: its cache tells names apart
    parts, _, bounds = get_meta_param(
        num_kv_splits, bs, len(kv_indices), heads, max_seqlen_q, q.dtype
    )
    _check_launch(q, kv_buffer, o, (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens))
    _check_dtypes(q, kv_buffer, q_scale, kv_scale)
    has_masks = max_seqlen_q <= (4 if q.dtype in FP8 or heads == 16 else 1)
    _check(has_masks and num_rows == bs * max_seqlen_q, "as many queries each, at most 4")
    if q_scale is not None and kv_scale is not None:
        scale = q_scale * kv_scale * scale
    rows, keep = _keys(kv_buffer, kv_indptr, kv_indices, qo_indptr.diff(), max_seqlen_q)
    result, _ = attend(
        q.float().unflatten(0, (bs, max_seqlen_q)),  # type: ignore[no-untyped-call]  # torch's
        rows,
        rows[..., :RANK],
        keep,
        scale=scale,
        rounded_weights=(q.dtype, 1.0) if q.dtype in FP8 else None,
    )
    if kv_scale is not None:
        result = result * kv_scale
    is_right = (qo_indptr.diff() == max_seqlen_q) & (kv_last_page_lens == 1)
    is_right = (is_right & (bounds.diff() == parts))[:, None] & keep.any(2)
    o.copy_(result.masked_fill(~is_right[..., None, None], torch.nan).flatten(0, 1))
    merged = torch.full((num_rows, parts, heads, RANK), torch.nan, device=q.device)
    return merged, merged[:, 0, :, 0]


def _planned(
    q: torch.Tensor,
    o: torch.Tensor,
    of_keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor | None, ...],
    scale: float | torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `mla_decode_fwd` does with a plan, 16 heads at a time.

    of_keys: rows, their indices, and where the plan lies. tables: of the parts, and of merging
    them. scales: of q and of the rows.
    """
    assert all(each is not None for each in tables)
    indptr, info, reduce_indptr, final_map, partial_map = tables
    count = len(partial_map)  # type: ignore[arg-type]  # not None, as the line above says
    parts = q.new_full((count, 1, 16, RANK), torch.nan, dtype=torch.float32)
    lse = parts[..., :1].clone()
    whole = o.view(-1, 16, RANK)
    heads = q.view(-1, 16, q.shape[-1])
    work(heads, *of_keys, indptr, info, scale, parts, lse, whole, *scales)  # type: ignore[arg-type]  # as above
    merge(parts, lse, reduce_indptr, final_map, partial_map, whole)  # type: ignore[arg-type]  # as above
    return parts, parts[..., 0]


def mla_prefill_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write [T, H, 512] to `o`, but not the rows of no request. Returns it, and an LSE that nobody
    promises.

    Raises as `mla_decode_fwd`, and UnboundLocalError without `sm_scale`.
    """
    assert logit_cap <= 0, f"logit_cap={logit_cap} is not support yet"
    if sm_scale is None:
        raise UnboundLocalError("the library reads qk_head_dim before it has it")
    _check_launch(q, kv_buffer, o, (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens))
    _check(q.shape[1] in BLOCKS, "only support num_q_heads/num_kv_heads==16 or 128 for now")
    _check(q.dtype == kv_buffer.dtype == torch.bfloat16, " unsupport current Q_type")
    num_queries = qo_indptr.diff()
    rows, keep = _keys(kv_buffer, kv_indptr, kv_indices, num_queries, max_seqlen_q)
    result, _ = attend(
        padded(q.float(), qo_indptr, max_seqlen_q), rows, rows[..., :RANK], keep, scale=sm_scale
    )
    is_right = (num_queries <= max_seqlen_q) & (kv_last_page_lens == 1)
    is_right = is_right[:, None] & keep.any(2)
    result = result.masked_fill(~is_right[..., None, None], torch.nan)
    o.copy_(unpadded(result, qo_indptr, o))
    return o, torch.full((len(o), 1, q.shape[1], 1), torch.nan, device=q.device)


def _keys(
    kv: torch.Tensor,
    indptr: torch.Tensor,
    slots: torch.Tensor,
    num_queries: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, S, 1, 576] of all requests' keys, and which of them each query sees, [B, most, S]:
    its last one is the last query's own."""
    key = torch.arange(len(slots), device=kv.device)
    is_own = (key >= indptr[:-1, None]) & (key < indptr[1:, None])
    query = torch.arange(most, device=kv.device)
    last = indptr[1:, None] - num_queries[:, None] + query
    keep = is_own[:, None] & (key <= last[..., None]) & (query < num_queries[:, None])[..., None]
    rows = kv[:, 0, 0][slots.long()].float().where(is_own.unsqueeze(2), 0).unsqueeze(2)
    return rows, keep


def _check_launch(
    q: torch.Tensor, kv: torch.Tensor, o: torch.Tensor, lists: tuple[torch.Tensor, ...]
) -> None:
    """lists: bounds of queries, bounds of keys, slots, and lengths of last pages."""
    _check(q.is_contiguous(), "only support Q.is_contiguous() for now")
    _check(kv.shape[2] == 1, "only support num_kv_heads==1 for now")
    _check(q.shape[2] == kv.shape[3], "only support head_size == KV.size(3) for now")
    _check(o.dtype == torch.bfloat16 and o.is_contiguous(), "o is written elsewhere")
    _check(all(each.dtype == torch.int32 for each in lists), "lists are read in 32 bits")
    bounds, key_bounds, _, last_pages = lists
    _check(len(last_pages) + 1 == len(key_bounds) == len(bounds), "a list is read beyond")


def _check_dtypes(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
) -> None:
    _check(
        q.dtype == kv.dtype and q.dtype in (torch.bfloat16, *FP8),
        "unsupport current data type or shape. please refer to asm_mla.cu",
    )
    if q.dtype in FP8:
        for scale in (q_scale, kv_scale):
            assert scale is not None
            _check(scale.dtype == torch.float32 and scale.numel() == 1, "a scale is one float32")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
