"""Writes K and V of new tokens to a pool of 4-bit floats, with the scales of their blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.write import round_to_8_bits

BLOCK = tl.constexpr(16)
"""Values that share a scale."""


@triton.jit
def pack(values):
    """Rows [T, W] float32 as bytes [T, W / 2] of two E2M1 values each, and their blocks' scales
    [T, W / BLOCK] as bits of E4M3: bit for bit as `pack_rows` of core."""
    T: tl.constexpr = values.shape[0]
    W: tl.constexpr = values.shape[1]
    blocks = values.reshape([T, W // BLOCK, BLOCK])
    bits = blocks.to(tl.int32, bitcast=True)
    # As integers, so that NaN is the largest of all.
    sizes = bits & 0x7FFFFFFF
    largest = tl.max(sizes, 2).to(tl.float32, bitcast=True)
    scales = round_to_8_bits(tl.div_rn(largest, 6.0), 3, 7, 0x7E, 0x7F)
    scale = scales.to(tl.int32)
    # Bits of a float32 whose exponent is 120 more; below the least normal number, a multiple of it.
    normal = ((scale << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    unit = tl.where(scale < 8, scale.to(tl.float32) * 0.001953125, normal)[:, :, None]
    size = sizes.to(tl.float32, bitcast=True)
    codes = (size > unit * 0.25).to(tl.int32) + (size >= unit * 0.75).to(tl.int32)
    codes += (size > unit * 1.25).to(tl.int32) + (size >= unit * 1.75).to(tl.int32)
    codes += (size > unit * 2.5).to(tl.int32) + (size >= unit * 3.5).to(tl.int32)
    codes += (size > unit * 5.0).to(tl.int32)
    codes = codes | ((bits >> 28) & 8)
    is_number = (scale > 0) & (scale < 0x7F)
    codes = tl.where(is_number[:, :, None], codes, 0)
    low, high = codes.reshape([T, W // 2, 2]).split()
    return (low | (high << 4)).to(tl.uint8), scales


@triton.jit
def store_columns(
    values, buffer, slot_stride, head_stride, slot, is_there, first,
    EACH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store values [T, N] to rows of buffer [slots, H, D / EACH]. first: the column of the first
    value, of WIDTH = H * D; each value stands for EACH columns."""
    column = first + tl.arange(0, values.shape[1]) * EACH
    places = (column // D).to(tl.int64) * head_stride + column % D // EACH
    tl.store(
        buffer + (slot * slot_stride)[:, None] + places[None, :],
        values,
        mask=is_there[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit
def store_part(
    rows, token_stride, head_stride, column_stride, buffer, slot_stride, slot_head_stride,
    scales, scales_stride, scales_head_stride, token, slot, is_there, first, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_W columns from `first` on of rows [T, WIDTH], WIDTH = H * D."""
    column = first + tl.arange(0, BLOCK_W)
    of_column = (column // D).to(tl.int64) * head_stride
    of_column += (column % D).to(tl.int64) * column_stride
    values = tl.load(
        rows + (token.to(tl.int64) * token_stride)[:, None] + of_column[None, :],
        mask=is_there[:, None] & (column < WIDTH)[None, :],
        other=0.0,
    ).to(tl.float32)
    if IS_SCALED:
        values = tl.div_rn(values, scale)
    packed, of_blocks = pack(values)
    store_columns(packed, buffer, slot_stride, slot_head_stride, slot, is_there, first, 2, D, WIDTH)
    store_columns(
        of_blocks, scales, scales_stride, scales_head_stride, slot, is_there, first, BLOCK, D, WIDTH
    )


@triton.jit(do_not_specialize=["num_tokens", "loc_stride"], do_not_specialize_on_alignment=["loc"])
def write_four_bits(
    first, first_stride, first_head_stride, first_column_stride,
    second, second_stride, second_head_stride, second_column_stride,
    first_buffer, first_slot_stride, first_slot_head_stride, second_buffer, second_slot_stride,
    second_slot_head_stride, first_scales, first_scales_stride, first_scales_head_stride,
    second_scales, second_scales_stride, second_scales_head_stride,
    loc, loc_stride, slot_map, num_mapped, num_tokens, num_slots, first_scale, second_scale,
    FIRST_D: tl.constexpr, FIRST_WIDTH: tl.constexpr, SECOND_D: tl.constexpr,
    SECOND_WIDTH: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write K and V to the same slots.

    first, second, loc, slot_map, widths, scales and grid: as of `write_kv`.
    first_buffer [num_slots, H, FIRST_D / 2], second_buffer [num_slots, H, SECOND_D / 2] uint8: the
    pool's packed values. first_scales [num_slots, H, FIRST_D / 16] and second_scales uint8: bits of
    the blocks' scales. BLOCK_W: a multiple of 16.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, mask=is_token, other=0)
    is_there = is_token & (slot >= 0) & (slot < num_mapped)
    if slot_map is not None:
        slot = tl.load(slot_map + slot, mask=is_there, other=0).to(tl.int64)
        is_there = is_there & (slot < num_slots)
    begin = tl.program_id(1) * BLOCK_W
    store_part(
        first, first_stride, first_head_stride, first_column_stride, first_buffer,
        first_slot_stride, first_slot_head_stride, first_scales, first_scales_stride,
        first_scales_head_stride, token, slot, is_there, begin, first_scale,
        FIRST_D, FIRST_WIDTH, IS_SCALED, BLOCK_W,
    )  # fmt: skip
    store_part(
        second, second_stride, second_head_stride, second_column_stride, second_buffer,
        second_slot_stride, second_slot_head_stride, second_scales, second_scales_stride,
        second_scales_head_stride, token, slot, is_there, begin, second_scale,
        SECOND_D, SECOND_WIDTH, IS_SCALED, BLOCK_W,
    )  # fmt: skip
