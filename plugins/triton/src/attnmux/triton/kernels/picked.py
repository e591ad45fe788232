"""Attention of each token over latent rows of its own, which an indexer picked."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.blocks import load_rows, nothing_seen, store_rows, weigh


@triton.jit(do_not_specialize=["topk", "part_keys", "num_tokens", "queries"])
def attend_picks(
    q, q_stride, q_head_stride, q_rope, q_rope_stride, q_rope_head_stride,
    k, k_stride, k_rope, k_rope_stride, table, table_stride, slot_map, rows, picks, picks_stride,
    out, out_stride, lse, lse_stride, topk, part_keys, num_tokens, queries, scale, v_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS, RANK] and q_rope [T, HEADS, ROPE]; k [n, RANK] and k_rope [n, ROPE], the latter
    of any dtype; picks [T, topk]: places in the token's request, -1 for none. V is k.

    table [R, W] int32: row rows[t // queries] has the row of k of each place of token t's request;
    without one, that number + place is it. slot_map: from such a row to k's own; None if they
    are equal.
    scale: of logits, for powers of 2.

    out and lse have a result for each part of a token's picks, one after another: [parts, T, HEADS,
    RANK] and [parts, T, HEADS] float32, natural logarithms. A part has part_keys picks.
    Grid: tokens, blocks of heads, parts.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.program_id(2)
    is_head = head < HEADS
    nope = load_rows(q + token * q_stride, head, q_head_stride, is_head, BLOCK_RANK, RANK, True)
    rope = load_rows(
        q_rope + token * q_rope_stride, head, q_rope_head_stride, is_head, BLOCK_ROPE, ROPE, True
    )
    row = tl.load(rows + token // queries)
    acc, top, mass = nothing_seen(BLOCK_H, BLOCK_RANK)
    end = tl.minimum((part + 1) * part_keys, topk)
    for first in range(part * part_keys, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        place = tl.load(picks + token * picks_stride + at, mask=at < end, other=-1)
        is_key = place >= 0
        if table is not None:
            key = tl.load(table + row * table_stride + place, mask=is_key, other=0).to(tl.int64)
        else:
            key = row + place
        if slot_map is not None:
            key = tl.load(slot_map + key, mask=is_key, other=0).to(tl.int64)
        latent = load_rows(k, key, k_stride, is_key, BLOCK_RANK, RANK, True).to(nope.dtype)
        rotary = load_rows(k_rope, key, k_rope_stride, is_key, BLOCK_ROPE, ROPE, True).to(
            rope.dtype
        )
        logits = tl.dot(nope, tl.trans(latent)) + tl.dot(rope, tl.trans(rotary))
        logits = tl.where(is_key[None, :], logits * scale, -float("inf"))
        weights, kept_share, top, mass = weigh(logits, top, mass, True)
        acc = acc * kept_share[:, None] + tl.dot(weights.to(latent.dtype), latent)
    result = part.to(tl.int64) * num_tokens + token
    store_rows(
        out, out_stride, lse, lse_stride, None, acc, top, mass, result, head,
        is_head, v_scale, BLOCK_RANK, RANK, False, HAS_LSE,
    )  # fmt: skip
