"""Index builders: from a batch and the request table to what attention kernels read.

Pure functions on tensors, vectorised, on the device of their inputs. Lengths come as int32
[B], `req_pool_indices` as int64 [B], `req_to_token` as contiguous int32 [rows, max_context].
Results are int32 unless a docstring says otherwise. A length of 0 is legal everywhere, and
so is a batch of 0.

Sizes that depend on values are Python ints: a builder takes them as `total` or `max_len`
where the caller has them, and synchronises with the device where they are None and nothing
else fixes the shape. A buffer given as `out` fixes it: the builder writes the buffer's front
without a synchronisation, which makes it fit for a device graph, and returns that part of it.

`kv_start` is the column of a request's row at which its keys begin: the encoder's length for
self-attention in an encoder-decoder model, or the start of a window or of a chunk. Pages can be
named only from the start of one: where `page_size` is above 1 it is a multiple of that. The
decoder's tokens begin wherever the encoder's end, often in mid-page; then ask for slots, with
`page_size` 1, whatever the pool's pages are.

Arguments of the wrong shape or dtype are InvalidInput. Values are not looked at.
"""

from __future__ import annotations

from attnmux.core.indices._segments import segment_of_place
from attnmux.core.indices.chunk import ChunkBatches, chunk_batches
from attnmux.core.indices.csr import kv_indices, kv_indptr, kv_last_page_len, out_cache_loc
from attnmux.core.indices.paged import block_count_multiple, page_table, whole_page_lens
from attnmux.core.indices.ragged import cu_seqlens, extend_positions, uniform_indptr
from attnmux.core.indices.splits import num_kv_splits
from attnmux.core.indices.topk import select_topk, token_rows, topk_slots
from attnmux.core.indices.verify import mask_indptr, verify_kv_lens, verify_qo_indptr
from attnmux.core.indices.window import KVView, window_view

__all__ = [
    "ChunkBatches",
    "KVView",
    "block_count_multiple",
    "chunk_batches",
    "cu_seqlens",
    "extend_positions",
    "kv_indices",
    "kv_indptr",
    "kv_last_page_len",
    "mask_indptr",
    "num_kv_splits",
    "out_cache_loc",
    "page_table",
    "segment_of_place",
    "select_topk",
    "token_rows",
    "topk_slots",
    "uniform_indptr",
    "verify_kv_lens",
    "verify_qo_indptr",
    "whole_page_lens",
    "window_view",
]
