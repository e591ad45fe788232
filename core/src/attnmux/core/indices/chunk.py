"""Chunked (local) attention as ordinary attention over more, shorter requests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.core.indices._segments import segment_of_place
from attnmux.core.indices.args import check_lens
from attnmux.core.indices.ragged import cu_seqlens
from attnmux.core.sizes import check_positive


class ChunkBatches(NamedTuple):
    """V virtual requests, each the part of a request's new tokens that lies in one chunk.

    They come in the order of the packed new tokens, so `cu_seqlens(q_lens)` cuts Q. Causal
    attention aligned to the end of both (token i of q and key i + kv_len - q_len) is chunked
    attention. Rows of the request table are `req_pool_indices[request]`, and kv_start
    goes to `page_table` or `kv_indices`; with pages the chunk is a multiple of the page size.
    """

    request: torch.Tensor
    """[V] int32: which request of the batch, 0 … B - 1."""
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
    """Cut each request's new tokens where chunks of their positions end: j // c == i // c.

    q_lens, kv_lens: [B] int32, new tokens and all keys; the new tokens are the last ones.
    kv_start: [B] int32, the column where the request's keys begin; added to the result's.
    total: V, or more: then the rest are requests of length 0. In decode V is B.
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
    # One empty request at the end answers for places that hold none.
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
