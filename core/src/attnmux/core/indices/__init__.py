"""Index builders: from a batch and the request table to the inputs of attention kernels.

Pure functions on tensors, vectorised, on the device of their inputs. Lengths come as int32
[B], `req_pool_indices` as int64 [B], `req_to_token` as contiguous int32 [rows, max_context].
Results are int32 unless a docstring says otherwise. Lengths of 0 and batches of 0 are legal.

Sizes that depend on values are Python ints, `total` or `max_len`. A builder synchronises with the
device where they are None and no `out` is given. With `out`, it writes the front of that buffer
without a synchronisation, as a device graph requires, and returns that part.

`kv_start` is the column of a request's row where its keys begin: the encoder's length for
self-attention in an encoder-decoder model, or the start of a window or a chunk. With a `page_size`
above 1 it must be a multiple of it. A decoder's tokens often begin in the middle of a page, after
the encoder's; then build slots, with `page_size` 1, whatever the pool's page size.

Arguments of a wrong shape or dtype raise InvalidInput. Values are not checked.
"""

from __future__ import annotations

from attnmux.core.indices._segments import segment_of_place
from attnmux.core.indices.keys import block_count_multiple, kv_indices, out_cache_loc, page_table
from attnmux.core.indices.local import KVView, window_view
from attnmux.core.indices.ragged import (
    cu_seqlens,
    extend_positions,
    kv_indptr,
    kv_last_page_len,
    mask_indptr,
    num_kv_splits,
    uniform_indptr,
    verify_kv_lens,
    verify_qo_indptr,
    whole_page_lens,
)
from attnmux.core.indices.topk import (
    best_keys,
    index_scores,
    select_topk,
    token_rows,
    topk_slots,
)

__all__ = [
    "KVView",
    "best_keys",
    "block_count_multiple",
    "cu_seqlens",
    "extend_positions",
    "index_scores",
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
