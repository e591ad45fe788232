"""Index builders: from a batch and the request table to the inputs of attention kernels.

Pure functions on tensors, vectorised, on the device of their inputs. Lengths come as int32
[B], `req_pool_indices` as int64 [B], `req_to_token` as contiguous int32 [rows, max_context].
Results are int32 unless a docstring says otherwise. Lengths of 0 and batches of 0 are legal.

Sizes that depend on values are Python ints, `total` or `max_len`. A builder synchronises with the
device if they are None and no `out` is given. With `out`, it writes the front of that buffer
without a synchronisation, as a device graph requires, and returns that part.

`kv_start` is the column of a request's row where its keys begin: the encoder's length for
self-attention in an encoder-decoder model, or the start of a window or a chunk. With a `page_size`
above 1 it must be a multiple of it. A decoder's tokens often begin in the middle of a page, after
the encoder's; then build slots, with `page_size` 1, whatever the pool's page size.

Arguments of a wrong shape or dtype raise InvalidInput. Values are not checked.
"""
