"""The keys that a request needs in layers with a sliding window or with chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.core.arguments import check_lens, check_positive, front
from attnmux.core.indices._segments import segment_of_place, store
from attnmux.core.indices.ragged import cu_seqlens


class KVView(NamedTuple):
    """A stretch of each request's keys."""

    kv_lens: torch.Tensor
    """[B] int32: keys of the stretch."""
    kv_start: torch.Tensor
    """[B] int32: column of the request's row where it begins."""


def window_view(
    seq_lens: torch.Tensor,
    sliding_window_size: int,
    *,
    q_lens: torch.Tensor | int = 1,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
    out: KVView | None = None,
) -> KVView:
    """The keys that the last q_lens tokens of each request can see.

    Token i sees keys j with i - w <= j <= i, so the view begins w keys before the first of these
    tokens; for one token it is the last w + 1 keys. A window below 0 is off: all keys.

    seq_lens: [B] int32, all keys, the new tokens' own included (in verify seq + d).
    q_lens: new tokens a request, [B] int32 or one number for all; 1 is decode.
    page_size: the view begins at the start of a page, so it may begin with up to page_size - 1
    keys outside of the window, which the kernel masks.
    kv_start: [B] int32, the column where the request's keys begin; the view's starts add to it.
    out: buffers of at least B values for both fields.
    """
    batch_size = check_lens("seq_lens", seq_lens)
    check_positive("page_size", page_size)
    if isinstance(q_lens, torch.Tensor):
        check_lens("q_lens", q_lens, batch_size)
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
    lens_out = start_out = None
    if out is not None:
        lens_out = front(out.kv_lens, batch_size, seq_lens)
        start_out = front(out.kv_start, batch_size, seq_lens)
    if sliding_window_size < 0:
        start = torch.zeros_like(seq_lens)
    else:
        start = (seq_lens - q_lens - sliding_window_size).clamp_(min=0)
        start -= start % page_size
    kv_lens = store(seq_lens - start, lens_out, torch.int32)
    if kv_start is not None:
        start += kv_start
    return KVView(kv_lens, store(start, start_out, torch.int32))


class ChunkBatches(NamedTuple):
    """V virtual requests, each with a request's new tokens of one chunk.

    They are in the order of the packed new tokens, so that `cu_seqlens(q_lens)` divides Q. Causal
    attention aligned to the end of both (token i of q and key i + kv_len - q_len) is chunked
    attention. Rows of the request table are `req_pool_indices[request]`, and kv_start
    goes to `page_table` or `kv_indices`; with pages the chunk is a multiple of the page size.
    """

    request: torch.Tensor
    """[V] int32: the request of the batch, 0 … B - 1."""
    q_lens: torch.Tensor
    """[V] int32: new tokens."""
    kv_lens: torch.Tensor
    """[V] int32: keys, from the chunk's first up to the last new token."""
    kv_start: torch.Tensor
    """[V] int32: column of the request's row where the keys begin."""


def chunk_batches(
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    chunk_size: int,
    *,
    kv_start: torch.Tensor | None = None,
    total: int | None = None,
) -> ChunkBatches:
    """Divide each request's new tokens by the chunks of their positions: j // c == i // c.

    q_lens, kv_lens: [B] int32, new tokens and all keys; the new tokens are the last ones.
    kv_start: [B] int32, the column where the request's keys begin; added to the result's.
    total: V or more; the rest are requests of length 0. In decode V is B.
    """
    batch_size = check_lens("q_lens", q_lens)
    check_lens("kv_lens", kv_lens, batch_size)
    check_positive("chunk_size", chunk_size)
    first_position = kv_lens - q_lens
    first_chunk = first_position // chunk_size
    num_chunks = ((kv_lens - 1) // chunk_size - first_chunk + 1) * (q_lens > 0)
    indptr = cu_seqlens(num_chunks)
    total = int(indptr[-1]) if total is None else total

    request = segment_of_place(indptr, total)
    # An empty request at the end stands for places without one
    first_position, first_chunk, kv_lens, begin = (
        torch.cat([values, values.new_zeros(1)])[request]
        for values in (first_position, first_chunk, kv_lens, indptr[:-1])
    )
    places = torch.arange(total, dtype=torch.int32, device=q_lens.device)
    start = (places - begin + first_chunk) * chunk_size
    end = torch.minimum(kv_lens, start + chunk_size)
    used = request < batch_size
    start_in_row = start.clamp(min=0) * used
    virtual_q_lens = (end - torch.maximum(first_position, start)) * used
    virtual_kv_lens = (end - start_in_row) * used
    if kv_start is not None:
        check_lens("kv_start", kv_start, batch_size)
        start_in_row = start_in_row + torch.cat([kv_start, kv_start.new_zeros(1)])[request]
    return ChunkBatches(request * used, virtual_q_lens, virtual_kv_lens, start_in_row)
