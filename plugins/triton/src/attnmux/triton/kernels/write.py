"""Writes K and V of new tokens to the slots of a pool, rounded to the pool's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.overlap import await_previous


@triton.jit
def round_to_8_bits(
    values, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):
    """float32 as the bits of an 8-bit float: to the nearest, ties to even, saturated.

    The rest describes the format, as `attnmux.triton.attention.write.Format` does. Uses integers,
    since Triton has no cast to these formats for SM80, and elsewhere the device decides whether a
    cast saturates.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    LEAST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # At this magnitude a float32's last bit equals the format's last bit below LEAST_NORMAL.
    BESIDE: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_odd = (size >> SHIFT) & 1
    normal = (size - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + is_odd) >> SHIFT
    beside = (size * 0 + BESIDE).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + beside).to(tl.int32, bitcast=True) - BESIDE
    rounded = tl.where(size < LEAST_NORMAL, small, tl.minimum(normal, LARGEST))
    sign = (bits >> 24) & 0x80
    if NAN == 0x80:
        sign = tl.where(rounded == 0, 0, sign)
    return tl.where(size > 0x7F800000, NAN, rounded | sign).to(tl.uint8)


@triton.jit
def store_part(
    rows, token_stride, head_stride, column_stride, buffer, slot_stride, slot_head_stride, token,
    slot, is_there, column, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Write columns of rows [T, WIDTH], WIDTH = H * D, to buffer [slots, H, D]: as the bits of an
    8-bit float if MANTISSA is above 0, else as values."""
    is_within = is_there[:, None] & (column < WIDTH)[None, :]
    head = (column // D).to(tl.int64)
    of_column = head * head_stride + (column % D).to(tl.int64) * column_stride
    values = tl.load(
        rows + (token.to(tl.int64) * token_stride)[:, None] + of_column[None, :],
        mask=is_within,
        other=0.0,
    )
    of_column = head * slot_head_stride + column % D
    places = buffer + (slot * slot_stride)[:, None] + of_column[None, :]
    if MANTISSA > 0:
        values = values.to(tl.float32)
        if IS_SCALED:
            values = tl.div_rn(values, scale)
        tl.store(places, round_to_8_bits(values, MANTISSA, BIAS, LARGEST, NAN), mask=is_within)
    else:
        tl.store(places, values.to(buffer.dtype.element_ty), mask=is_within)


@triton.jit(do_not_specialize=["num_tokens", "loc_stride"], do_not_specialize_on_alignment=["loc"])
def write_kv(
    first, first_stride, first_head_stride, first_column_stride,
    second, second_stride, second_head_stride, second_column_stride,
    first_buffer, first_slot_stride, first_slot_head_stride, second_buffer, second_slot_stride,
    second_slot_head_stride, loc, loc_stride, slot_map, num_mapped, num_tokens, num_slots,
    first_scale, second_scale,
    FIRST_D: tl.constexpr, FIRST_WIDTH: tl.constexpr, SECOND_D: tl.constexpr,
    SECOND_WIDTH: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write two tensors, K and V or latent and rotary key, to the same slots.

    first [T, H, FIRST_D], second [T, H, SECOND_D]: of any float dtype and strides.
    first_buffer [num_slots, H, FIRST_D], second_buffer [num_slots, H, SECOND_D]: the pool's memory,
    uint8 if MANTISSA is above 0; slots and heads may have gaps between them. A width is a slot's
    heads times columns.
    loc [T] int64: the tokens' slots. slot_map [num_mapped] int32 or int64: the pool's slot for each
    of them; None if they are the same.
    first_scale, second_scale float32: divided by if IS_SCALED. The format: as
    `round_to_8_bits`. OVERLAPS: the launch begins before the previous one ends and waits for its
    results, and lets the next launch begin.

    Grid: blocks of BLOCK_T tokens, blocks of BLOCK_W columns. Slots that the pool does not have are
    skipped.
    """
    await_previous(OVERLAPS)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, mask=is_token, other=0)
    is_there = is_token & (slot >= 0) & (slot < num_mapped)
    if slot_map is not None:
        slot = tl.load(slot_map + slot, mask=is_there, other=0).to(tl.int64)
        is_there = is_there & (slot < num_slots)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    store_part(
        first, first_stride, first_head_stride, first_column_stride, first_buffer,
        first_slot_stride, first_slot_head_stride, token, slot, is_there, column, first_scale,
        FIRST_D, FIRST_WIDTH, MANTISSA, BIAS, LARGEST, NAN, IS_SCALED,
    )  # fmt: skip
    store_part(
        second, second_stride, second_head_stride, second_column_stride, second_buffer,
        second_slot_stride, second_slot_head_stride, token, slot, is_there, column, second_scale,
        SECOND_D, SECOND_WIDTH, MANTISSA, BIAS, LARGEST, NAN, IS_SCALED,
    )  # fmt: skip
