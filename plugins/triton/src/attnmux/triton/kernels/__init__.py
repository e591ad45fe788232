"""The kernels. Importing a module imports Triton.

Portable, in Triton:
    blocks.py   keys block by block, and the running softmax, for the next two
    tiles.py    attention of many new tokens a request, in tiles of queries
    shares.py   attention of few new tokens a request, over equal shares of all keys
    merge.py    merges two partial results
    write.py    writes K and V of new tokens to their slots
    overlap.py  lets launches of write.py and one_row.py begin before the previous one ends
    trees.py    builds draft trees, follows them greedily, and samples them
    indices.py  builds from lengths and the request table what other kernels read
    one_row.py  the product of one row with a weight matrix, with what is around it
    picked.py   attention of each token over rows that an indexer picked
    picked_blocks.py   attention of each token over blocks of keys that an indexer picked
    chosen_pages.py    bounds, scores, choice and copies of the pages that a decode step reads
    index_scores.py    an indexer's scores of the keys that each token sees

Recurrent layers and short convolutions, in `linear/`:
    tokens.py   recurrences token by token
    chunks.py   recurrences in chunks, with channel_chunks.py (a decay for each channel) and
                chunk_states.py (states from chunk to chunk)
    channel_scan.py   layers whose every channel is a head
    convolutions.py   short convolutions

For Hopper GPUs, in Gluon, Triton's lower level language, in `hopper/`:
    tiles.py    as the portable one, with places.py (a program's rows and keys) and weights.py (the
                softmax)
    shares.py   as the portable one, with eight_bits.py (8-bit K and V) and share_results.py
                (results and their merging)
    latent.py   as shares.py for absorbed MLA, with latent_merge.py
    copies.py   copies into shared memory
    walk.py     a program's way through its share of the keys

Docstrings of kernels give shapes and dtypes of the tensors. T tokens, B requests, Hq and Hkv heads;
an int32 `x_stride` beside a tensor x is the distance of its rows in elements, `x_head_stride` that
of heads. A tensor's columns are contiguous. What a kernel leaves out here is as in `attend_tiles`.
"""
