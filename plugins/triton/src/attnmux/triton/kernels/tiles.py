"""Attention of many new tokens a request: a program for each tile of queries and each KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.blocks import (
    Keys,
    Queries,
    Sight,
    Widths,
    as_halves,
    attend_blocks,
    biases_of,
    nothing_seen,
    part_of_range,
    slopes_of,
    store_rows,
    tile_of_queries,
    visible_range,
)

COMPARED = tl.constexpr(16)
"""Requests with which all are compared at a time."""


@triton.jit(
    do_not_specialize=["batch_size", "num_tokens", "num_tiles"],
    do_not_specialize_on_alignment=["q_indptr", "lens"],
)
def plan_tiles(
    q_indptr, lens, tile_request, tile_row, batch_size, num_tokens, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Find the request and the first row of TILES tiles.

    Requests with fewer keys come first. Programs begin with the last tile, so that the longest run
    first, and the device is busy to the end.

    q_indptr [B + 1] int32: each request's first new token. lens [B] int32: the tokens before
    these. tile_request, tile_row [at least
    num_tiles] int32: the results. Tokens after those of all requests belong to a request B. A tile
    that has no request gets -1. BLOCK_B: a power of 2, at least B + 1. Grid: blocks of TILES tiles.
    """
    request = tl.arange(0, BLOCK_B)
    begin = tl.load(q_indptr + request, mask=request <= batch_size, other=0)
    end = tl.load(q_indptr + request + 1, mask=request < batch_size, other=0)
    end = tl.where(request == batch_size, num_tokens, end)
    tiles = tl.where(request <= batch_size, ((end - begin) * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
    keys = tl.load(lens + request, mask=request < batch_size, other=0) + end - begin
    start = request * 0
    for first in range(0, batch_size, COMPARED):
        other = first + tl.arange(0, COMPARED)
        is_other = other < batch_size
        other_begin = tl.load(q_indptr + other, mask=is_other, other=0)
        new = tl.load(q_indptr + other + 1, mask=is_other, other=0) - other_begin
        other_keys = tl.load(lens + other, mask=is_other, other=0) + new
        other_tiles = (new * GROUP + BLOCK_M - 1) // BLOCK_M
        is_before = (other_keys[:, None] < keys[None, :]) | (request == batch_size)[None, :]
        is_before |= (other_keys[:, None] == keys[None, :]) & (other[:, None] < request[None, :])
        start += tl.sum(tl.where(is_before, other_tiles[:, None], 0), 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owns = (start[None, :] <= tile[:, None]) & (tile[:, None] < (start + tiles)[None, :])
    owner = tl.sum(tl.where(owns, request[None, :], 0), 1)
    own_start = tl.sum(tl.where(owns, start[None, :], 0), 1)
    is_tile = tile < num_tiles
    is_owned = tl.sum(owns.to(tl.int32), 1) > 0
    tl.store(tile_request + tile, tl.where(is_owned, owner, -1), mask=is_tile)
    tl.store(tile_row + tile, tl.where(is_owned, tile - own_start, 0) * BLOCK_M, mask=is_tile)


@triton.jit(
    do_not_specialize=["batch_size", "num_tokens", "num_tiles", "num_splits"],
    do_not_specialize_on_alignment=[
        "rows",
        "cached_lens",
        "encoder_lens",
        "mask",
        "mask_indptr",
        "shared_lens",
        "token_pos_in_items",
    ],
)
def attend_tiles(
    q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride,
    k, k_stride, k_head_stride, k_tail, k_tail_stride, k_tail_head_stride,
    v, v_stride, v_head_stride, k_scales, k_scales_stride, k_scales_head_stride,
    v_scales, v_scales_stride, v_scales_head_stride, out, out_stride, lse, lse_stride, sinks,
    alibi_slopes, relative_bias, slots, slots_stride,
    rows, cached_lens, encoder_lens, encoder_indptr, q_indptr, tile_request, tile_row, mask,
    mask_indptr, shared_lens, token_pos_in_items, batch_size, num_tokens, num_tiles, num_splits,
    scale, cap, v_scale,
    GROUP: tl.constexpr, D: tl.constexpr, REAL_D: tl.constexpr, TAIL: tl.constexpr,
    REAL_TAIL: tl.constexpr, DV: tl.constexpr, REAL_DV: tl.constexpr, PAGE: tl.constexpr,
    IS_LATENT: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_CROSS: tl.constexpr, IN_CALL: tl.constexpr,
    HAS_ENCODER: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_ITEMS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr, HAS_ALIBI: tl.constexpr, REACH: tl.constexpr,
    FOUR_BITS: tl.constexpr,
):  # fmt: skip
    """Attend from tiles of queries to the pool's keys or, IN_CALL, to those of the call.

    Tensors; those of a feature that is off are None:

    q [T, Hq, REAL_D], q_tail [T, Hq, REAL_TAIL]: Q in two parts, of a 16-bit or 32-bit float dtype.
    k [slots, Hkv, REAL_D], k_tail [slots, Hkv, REAL_TAIL], v [slots, Hkv, REAL_DV]: of Q's dtype or
    of 8-bit floats; IN_CALL their rows are the call's tokens. IS_LATENT: v is not read, K's first
    part is V. FOUR_BITS: int32 words of 8 values each, and k_scales, v_scales [slots, Hkv, words]
    int32 with 4 scales each: see `four_bits`.
    out [T, Hq, REAL_DV] of Q's dtype, lse [T, Hq] float32: a token's heads side by side.
    sinks, alibi_slopes [Hq] float32. relative_bias [Hq, REACH + 1] or, unless IS_CAUSAL,
    [Hq, 2 * REACH + 1] float32, contiguous; REACH is -1 without it.
    slots [R, W] int32: slots or, with PAGE above 1, pages of each row. rows [B] int64: each
    request's row; None if request i has row i.
    cached_lens [B] int32: tokens before the new ones; None IN_CALL.
    encoder_lens [B] int32: IS_CROSS or HAS_ENCODER; the decoder's slots then follow the encoder's.
    encoder_indptr [B + 1] int32: IS_CROSS and IN_CALL, each request's first row of K.
    q_indptr [B + 1], tile_request and tile_row [num_tiles] int32: see `plan_tiles`.
    mask flat uint8, mask_indptr [B + 1] int64 or int32: HAS_MASK, each request's q_len x kv_len
    values and where they begin.
    shared_lens [B] int32, token_pos_in_items [T] int32: HAS_ITEMS, the length of the prefix that
    all items see, and each token's place in its item.

    Numbers: batch_size, num_tokens, num_tiles int32; scale, times log2(e) unless HAS_CAP, cap and
    v_scale float32. Widths without REAL_ are those of tiles, see `Widths`.

    SPLIT_BLOCKS above 0: num_splits programs share the keys of a tile, at least that many blocks
    each; out and lse have a result of each, one after another, for `merge_splits`.

    Grid: KV heads, tiles, splits. The last tiles of a request see the most keys, so they come
    first.
    """
    kv_head = tl.program_id(0)
    tile = num_tiles - 1 - tl.program_id(1)
    request = tl.load(tile_request + tile)
    if request < 0:
        return
    is_request = request < batch_size
    q_begin = tl.load(q_indptr + request)
    q_len = tl.load(q_indptr + request + 1, mask=is_request, other=num_tokens) - q_begin
    cached = 0
    if not IN_CALL:
        cached = tl.load(cached_lens + request, mask=is_request, other=0)
    if IS_CROSS:
        num_keys = tl.load(encoder_lens + request, mask=is_request, other=0)
    else:
        num_keys = tl.where(is_request, cached + q_len, 0)
    if IN_CALL:
        keys_base = q_begin
        if IS_CROSS:
            keys_base = tl.load(encoder_indptr + request)
    else:
        row = request
        if rows is not None:
            row = tl.load(rows + request, mask=is_request, other=0)
        keys_base = slots + row.to(tl.int64) * slots_stride
        if HAS_ENCODER:
            keys_base += tl.load(encoder_lens + request, mask=is_request, other=0)

    is_real, order, token, head, q_tile, tail_tile = tile_of_queries(
        Queries(q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride),
        tl.load(tile_row + tile), q_len, q_begin, kv_head, GROUP,
        Widths(D, REAL_D, TAIL, REAL_TAIL, DV, REAL_DV), BLOCK_M, FOUR_BITS,
    )  # fmt: skip
    q_scale = scale
    if k.dtype.element_ty.primitive_bitwidth != 16 and q.dtype.element_ty == tl.bfloat16:
        q_tile, tail_tile, factor = as_halves(q_tile, tail_tile, TAIL > 0)
        q_scale = (scale * factor)[:, None]
    position = cached + order
    first, end = visible_range(position, num_keys, IS_CAUSAL, WINDOW, CHUNK)
    mask_rows = mask
    if HAS_MASK:
        mask_rows = mask + tl.load(mask_indptr + request) + order.to(tl.int64) * num_keys
    shared_end = position
    item_start = position
    if HAS_ITEMS:
        shared_end = position * 0 + tl.load(shared_lens + request, mask=is_request, other=0)
        item_start = position - tl.load(token_pos_in_items + token)

    slope = slopes_of(alibi_slopes, head, HAS_ALIBI)
    AHEAD: tl.constexpr = 0 if IS_CAUSAL else REACH
    biases = biases_of(relative_bias, head, position, REACH, AHEAD)
    k += kv_head.to(tl.int64) * k_head_stride
    if TAIL > 0:
        k_tail += kv_head.to(tl.int64) * k_tail_head_stride
    v += kv_head.to(tl.int64) * v_head_stride
    if FOUR_BITS:
        k_scales += kv_head.to(tl.int64) * k_scales_head_stride
        v_scales += kv_head.to(tl.int64) * v_scales_head_stride
    acc, top, mass = nothing_seen(BLOCK_M, DV)
    low = tl.min(first, 0) // BLOCK_N * BLOCK_N
    high = tl.max(end, 0)
    # Between these every row sees every key.
    whole_low = (tl.max(first, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    whole_high = tl.maximum(tl.min(end, 0) // BLOCK_N * BLOCK_N, 0)
    if HAS_MASK or HAS_ITEMS:
        whole_high = 0
    if SPLIT_BLOCKS > 0:
        split = tl.program_id(2)
        first_block, last_block = part_of_range(
            low // BLOCK_N, (high + BLOCK_N - 1) // BLOCK_N, split, num_splits, SPLIT_BLOCKS
        )
        low = first_block * BLOCK_N
        high = tl.minimum(last_block * BLOCK_N, high)
        whole_low = tl.maximum(whole_low, low)
        out += split.to(tl.int64) * num_tokens * out_stride
        lse += split.to(tl.int64) * num_tokens * lse_stride
    whole_low = tl.minimum(whole_low, high)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), high)
    # Without a window, every row sees the keys from the first on.
    for part in tl.static_range(0 if WINDOW >= 0 or CHUNK > 0 else 1, 3):
        if part == 0:
            start, stop = low, whole_low
        elif part == 1:
            start, stop = whole_low, whole_high
        else:
            start, stop = whole_high, high
        acc, top, mass = attend_blocks(
            acc, top, mass, q_tile, tail_tile,
            Keys(
                k, k_stride, k_tail, k_tail_stride, v, v_stride, k_scales, k_scales_stride,
                v_scales, v_scales_stride, keys_base,
            ),
            start, stop, num_keys,
            Sight(first, end, mask_rows, 0, shared_end, item_start, position, slope, biases),
            q_scale, cap,
            Widths(D, REAL_D, TAIL, REAL_TAIL, DV, REAL_DV), BLOCK_N, PAGE, IS_LATENT, IN_CALL,
            HAS_CAP, HAS_MASK, HAS_ITEMS, part != 1, HAS_ALIBI, REACH, AHEAD, STAGES,
            FOUR_BITS,
        )  # fmt: skip
    store_rows(
        out, out_stride, lse, lse_stride, sinks, acc, top, mass, token, head, is_real, v_scale,
        DV, REAL_DV, HAS_SINKS, HAS_LSE, FOUR_BITS,
    )  # fmt: skip
