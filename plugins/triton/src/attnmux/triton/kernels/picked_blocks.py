"""Attention of each token and head over blocks of keys of its own, which an indexer picked."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.blocks import load_rows, nothing_seen, store_rows, weigh


@triton.jit(do_not_specialize=["topk", "part_picks", "num_tokens"])
def attend_picked_blocks(
    q, q_stride, q_head_stride, k, k_stride, k_head_stride, v, v_stride, v_head_stride,
    table, table_stride, slot_map, rows, positions, picks, picks_stride, picks_head_stride,
    out, out_stride, lse, lse_stride, topk, part_picks, num_tokens, scale, v_scale,
    SIZE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q [T, Hq, DIM]; k [n, Hkv, DIM] and v [n, Hkv, V_DIM] of any dtype; picks [T, Hp, topk]:
    blocks of SIZE keys in the token's request, -1 for none. Query head h has the picks of head
    h // GROUP, and these are of KV head h // GROUP // SHARED. rows, positions [T] int64: row of the
    table, place in the request.

    table [R, W] int32 has the slot of each place of a request. slot_map: from it to the layer's own
    row; None if they are equal. scale: of logits, for powers of 2.

    out and lse have a result for each part of a token's picks, one after another: [parts, T, Hq,
    V_DIM] and [parts, T, Hq] float32, natural logarithms. A part has part_picks picks.
    Grid: tokens, heads of the picks, parts.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    member = tl.arange(0, BLOCK_H)
    is_member = member < GROUP
    query = head * GROUP + member
    queries = load_rows(q + token * q_stride, query, q_head_stride, is_member, BLOCK_D, DIM, True)
    row = tl.load(rows + token)
    last = tl.load(positions + token)
    mine = picks + token * picks_stride + head * picks_head_stride
    k_head = k + (head // SHARED) * k_head_stride
    v_head = v + (head // SHARED) * v_head_stride
    acc, top, mass = nothing_seen(BLOCK_H, BLOCK_V)
    end = tl.minimum((part + 1) * part_picks, topk) * SIZE
    for first in range(part * part_picks * SIZE, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        block = tl.load(mine + at // SIZE, mask=at < end, other=-1)
        place = block * SIZE + at % SIZE
        is_key = (block >= 0) & (place <= last)
        key = tl.load(table + row * table_stride + place, mask=is_key, other=0).to(tl.int64)
        if slot_map is not None:
            key = tl.load(slot_map + key, mask=is_key, other=0).to(tl.int64)
        keys = load_rows(k_head, key, k_stride, is_key, BLOCK_D, DIM, True).to(queries.dtype)
        values = load_rows(v_head, key, v_stride, is_key, BLOCK_V, V_DIM, True).to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        logits = tl.where(is_key[None, :], logits, -float("inf"))
        weights, kept_share, top, mass = weigh(logits, top, mass, True)
        acc = tl.dot(
            weights.to(values.dtype), values, acc * kept_share[:, None], input_precision=PRECISION
        )
    result = part.to(tl.int64) * num_tokens + token
    store_rows(
        out, out_stride, lse, lse_stride, None, acc, top, mass, result, query,
        is_member, v_scale, BLOCK_V, V_DIM, False, HAS_LSE,
    )  # fmt: skip
