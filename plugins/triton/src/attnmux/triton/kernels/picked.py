"""Attention of each token over latent rows of its own, which an indexer picked."""

from __future__ import annotations

import triton
import triton.language as tl


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
    without one, that number + place is it. slot_map: from such a row to k's own; None where they
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
    column = tl.arange(0, BLOCK_RANK)
    is_column = (column < RANK)[None, :]
    turned = tl.arange(0, BLOCK_ROPE)
    is_turned = (turned < ROPE)[None, :]
    nope = tl.load(
        q + token * q_stride + head[:, None] * q_head_stride + column[None, :],
        mask=is_head[:, None] & is_column,
        other=0.0,
    )
    rope = tl.load(
        q_rope + token * q_rope_stride + head[:, None] * q_rope_head_stride + turned[None, :],
        mask=is_head[:, None] & is_turned,
        other=0.0,
    )
    row = tl.load(rows + token // queries)
    empty = -float("inf")
    top = tl.full([BLOCK_H], empty, tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_RANK], tl.float32)
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
        latent = tl.load(
            k + key[:, None] * k_stride + column[None, :],
            mask=is_key[:, None] & is_column,
            other=0.0,
        ).to(nope.dtype)
        rotary = tl.load(
            k_rope + key[:, None] * k_rope_stride + turned[None, :],
            mask=is_key[:, None] & is_turned,
            other=0.0,
        ).to(rope.dtype)
        logits = tl.dot(nope, tl.trans(latent)) + tl.dot(rope, tl.trans(rotary))
        logits = tl.where(is_key[None, :], logits * scale, empty)
        higher = tl.maximum(top, tl.max(logits, 1))
        # Without keys so far: inf - inf is NaN.
        base = tl.where(higher == empty, 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(latent.dtype), latent)
        top = higher
    is_empty = mass == 0.0
    acc = acc * (v_scale / tl.where(is_empty, 1.0, mass))[:, None]
    result = part.to(tl.int64) * num_tokens + token
    tl.store(
        out + result * out_stride + head[:, None] * RANK + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_head[:, None] & is_column,
    )
    if HAS_LSE:
        value = tl.where(is_empty, empty, (top + tl.log2(mass)) * 0.6931471805599453)
        tl.store(lse + result * lse_stride + head, value, mask=is_head)
