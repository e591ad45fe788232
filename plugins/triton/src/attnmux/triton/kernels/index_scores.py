"""An indexer's scores of the keys that each token sees."""

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
