"""An indexer's scores of the keys that each token sees, and the places of the highest ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3(byte):
    """The float32 of a byte in e4m3fn. By integers: not every GPU's compiler has the format."""
    bits = byte.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    # Of 2**-9: a compiler may flush subnormal float32 to zero
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where(bits & 127 == 127, float("nan"), value)
    return tl.where(bits & 128 != 0, -value, value)


@triton.jit(do_not_specialize=["scores_stride", "queries"])
def score_keys(
    q, q_stride, q_head_stride, weights, weights_stride, rows, positions, table, table_stride,
    keys, keys_stride, scales, scales_stride, scores, scores_stride, queries,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS, DIM]; weights [T, HEADS] float32; rows [T // queries] int64, each token's row of
    table [R, W] int32; positions [T] int64. keys [slots, DIM]: bytes of e4m3, with scales [slots,
    DIM / 128] float32, or without scales any float.

    scores [T, S] float32 is written up to each token's place: the sum over the heads h of
    weights[t, h] * relu(q[t, h] . key).
    Grid: tokens, blocks of places.
    """
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(positions + token).to(tl.int32) + 1
    if tl.program_id(1) * BLOCK_N < count:
        place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_key = place < count
        row = tl.load(rows + token // queries)
        slot = tl.load(table + row * table_stride + place, mask=is_key, other=0).to(tl.int64)
        head = tl.arange(0, BLOCK_H)
        is_head = head < HEADS
        products = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
        for first in tl.static_range(0, DIM, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            is_column = column < DIM
            query = tl.load(
                q + token * q_stride + head[None, :] * q_head_stride + column[:, None],
                mask=is_head[None, :] & is_column[:, None],
                other=0.0,
            )
            key = tl.load(
                keys + slot[:, None] * keys_stride + column[None, :],
                mask=is_key[:, None] & is_column[None, :],
                other=0,
            )
            if scales is not None:
                part = tl.dot(e4m3(key).to(query.dtype), query, input_precision=PRECISION)
                scale = tl.load(
                    scales + slot * scales_stride + first // 128, mask=is_key, other=0.0
                )
                products += part * scale[:, None]
            else:
                products += tl.dot(key.to(query.dtype), query, input_precision=PRECISION)
        weight = tl.load(weights + token * weights_stride + head, mask=is_head, other=0.0)
        # Not by maximum, which drops NaN
        seen = tl.where(products < 0.0, 0.0, products)
        score = tl.sum(seen * weight[None, :], 1)
        tl.store(scores + token * scores_stride + place, score, mask=is_key)


@triton.jit
def ordered(score):
    """int64 from 0 to 2**32 - 1 that compare as floats do."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) + 2147483648


@triton.jit
def narrow(
    scores, count, border, missing,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(border, missing) with the digit of WIDTH bits above SHIFT appended to border, the digits of
    the lowest picked score before it; missing picks begin with these digits."""
    histogram = tl.zeros([2048], tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = ordered(tl.load(scores + at, mask=at < count, other=0.0))
        is_open = (at < count) & ((value >> (SHIFT + WIDTH)) == border)
        digit = ((value >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
        histogram += tl.histogram(digit, 2048, mask=is_open)
    # Scores of a digit or a higher one: they fall from digit to digit
    reached = tl.cumsum(histogram, 0, reverse=True)
    chosen = tl.sum((reached >= missing).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(tl.arange(0, 2048) > chosen, histogram, 0), 0)
    return (border << WIDTH) + chosen, missing - above


@triton.jit(do_not_specialize=["scores_stride", "topk"])
def select_highest(
    scores, scores_stride, positions, picks, picks_stride, topk,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """picks [T, topk] int32: the places of the highest scores [T, S] float32 up to each token's
    place, ascending; then -1. Among equal scores at the border, the first ones are picked.

    A radix select: the lowest picked score is found digit by digit, by histograms of 11, 11 and 10
    bits. Grid: tokens.
    """
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(positions + token).to(tl.int32) + 1
    scores += token * scores_stride
    picks += token * picks_stride
    lane = tl.arange(0, BLOCK)
    if count <= topk:
        for first in range(0, topk, BLOCK):
            at = first + lane
            tl.store(picks + at, tl.where(at < count, at, -1), mask=at < topk)
    else:
        border = tl.zeros([], tl.int64)
        border, missing = narrow(scores, count, border, topk, BLOCK, 21, 11)
        border, missing = narrow(scores, count, border, missing, BLOCK, 10, 11)
        border, missing = narrow(scores, count, border, missing, BLOCK, 0, 10)
        written = tl.zeros([], tl.int32)
        for first in range(0, count, BLOCK):
            is_score = first + lane < count
            value = ordered(tl.load(scores + first + lane, mask=is_score, other=0.0))
            at_border = (is_score & (value == border)).to(tl.int32)
            is_picked = (is_score & (value > border)) | (
                (at_border == 1) & (tl.cumsum(at_border, 0) <= missing)
            )
            missing -= tl.minimum(tl.sum(at_border, 0), missing)
            one = is_picked.to(tl.int32)
            at = written + tl.cumsum(one, 0) - 1
            tl.store(picks + at, first + lane, mask=is_picked)
            written += tl.sum(one, 0)
