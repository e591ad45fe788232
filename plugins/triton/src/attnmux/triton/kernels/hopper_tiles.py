"""`attend_tiles` for Hopper GPUs, in Gluon, with copies and products in different warps.

One group of warps copies the keys' rows into shared memory, up to `STAGES` blocks ahead; two
warpgroups of 64 rows each multiply and compute the softmax. While the tensor cores work on the
values of a block, their warpgroup computes the softmax of the next one (Shah et al.,
FlashAttention-3, arXiv:2407.08608, section 3.2). Blocks go from the last key to the first: the
first block's softmax overlaps with nothing, and the last keys have to be masked anyway.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnmux.triton.kernels.hopper_copies import COLUMNS_A_COPY, copy_keys, make_ring, whole_rows
from attnmux.triton.kernels.hopper_places import Kind, place_tile, visible_range
from attnmux.triton.kernels.hopper_weights import LOG2_E, pack, unpack, weigh

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
"""Rows of a warpgroup, which are those of its matrix instruction."""
READERS = gl.constexpr(2)
"""Warpgroups that read the keys."""


@gluon.jit
def multiply_keys(q_tile, keys, layout: gl.constexpr):
    """Begin to compute a block's logits [ROWS, BLOCK_N]."""
    nothing = gl.full([ROWS, keys.shape[0]], 0.0, gl.float32, layout)
    return warpgroup_mma(q_tile, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(pairs, values, acc):
    """Begin to add a block's weighted values to acc [ROWS, D]."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(unpack(pairs, values.dtype), layout)
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def scaled(acc, share):
    return acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def attend_turns(
    acc, top, mass, pairs, turn, last_turn, q_tile, k_ring, v_ring, tile, first, end, scale, cap,
    HIDES: gl.constexpr, kind,
    layout: gl.constexpr,
):  # fmt: skip
    """The turns of a tile after the first. Each begins with its own keys and the previous turn's
    values in shared memory, and with the previous turn's weights in registers."""
    for at in range(turn, last_turn):
        logits = multiply_keys(q_tile, k_ring.block(at), layout)
        acc = multiply_values(pairs, v_ring.block(at - 1), acc)
        logits = warpgroup_mma_wait(1, deps=[logits])
        k_ring.release(at)
        weights, kept_share, top, mass = weigh(
            logits, top, mass, tile.stop - 1 - at, first, end, scale, cap, HIDES, kind
        )
        # Waits here and not where the rows are read: the assembler moves no part of the softmax
        # past the waits, where it would wait for the product.
        v_ring.await_full(at)
        k_ring.await_full(at + 1, at + 1 < tile.stop - tile.start)
        fence_async_shared()
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        v_ring.release(at - 1)
        acc = scaled(acc, kept_share)
        pairs = pack(weights, q_tile.dtype)
    return acc, top, mass, pairs


@gluon.jit
def attend_tile(acc, top, mass, q_tile, k_ring, v_ring, tile, first, end, scale, cap, kind):
    """Add all of a tile's keys to the running softmax of its rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_N, 16])
    turns = tile.stop - tile.start
    k_ring.await_full(0)
    fence_async_shared()
    logits = warpgroup_mma_wait(0, deps=[multiply_keys(q_tile, k_ring.block(0), layout)])
    k_ring.release(0)
    weights, _, top, mass = weigh(
        logits, top, mass, tile.stop - 1, first, end, scale, cap, True, kind
    )
    pairs = pack(weights, q_tile.dtype)
    v_ring.await_full(0)
    k_ring.await_full(1, turns > 1)
    fence_async_shared()
    whole_turn = gl.maximum(tile.stop - tile.whole_stop, 1)
    hiding_turn = gl.maximum(tile.stop - tile.whole_start, whole_turn)
    # Without a window, every row sees the keys from the first on.
    for part in gl.static_range(3 if kind.WINDOW >= 0 or kind.CHUNK > 0 else 2):
        if part == 0:
            turn, last_turn = 1, whole_turn
        elif part == 1:
            turn, last_turn = whole_turn, hiding_turn
        else:
            turn, last_turn = hiding_turn, turns
        acc, top, mass, pairs = attend_turns(
            acc, top, mass, pairs, turn, last_turn, q_tile, k_ring, v_ring, tile, first, end,
            scale, cap, part != 1, kind, layout,
        )  # fmt: skip
    acc = multiply_values(pairs, v_ring.block(turns - 1), acc)
    return warpgroup_mma_wait(0, deps=[acc]), top, mass


@gluon.jit
def queries_of(tile, row, GROUP: gl.constexpr):
    """The tokens and heads of rows of a request."""
    return (tile.q_begin + row // GROUP).to(gl.int64), tile.kv_head * GROUP + row % GROUP


@gluon.jit
def attend_rows(
    q, q_stride, q_head_stride, out, out_stride, lse, lse_stride,
    sinks, scale, cap, v_scale, q_tiles, k_ring, v_ring, tile, kind,
    PART: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Attend from the tile's rows that warpgroup PART has, and store the results."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.D, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(
        1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_N, 16])
    )
    wide: gl.constexpr = gl.BlockedLayout(
        [1, COLUMNS_A_COPY],
        [32 * COLUMNS_A_COPY // kind.D, kind.D // COLUMNS_A_COPY],
        [4, 1],
        [1, 0],
    )
    q_tile = q_tiles.index(PART)
    wide_row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, rows_layout)
    acc = gl.zeros([ROWS, kind.D], gl.float32, acc_layout)
    top = gl.full([ROWS], -float("inf"), gl.float32, rows_layout)
    mass = gl.zeros([ROWS], gl.float32, rows_layout)
    if tile.stop > tile.start:
        # Rows after the last are copies of it, so that they need no other keys.
        last_row = tile.num_rows - 1
        token, head = queries_of(tile, gl.minimum(wide_row, last_row), kind.GROUP)
        offsets = token * q_stride + head.to(gl.int64) * q_head_stride
        q_tile.store(gl.load(whole_rows(q, offsets, kind.D, wide)))
        fence_async_shared()
        position = tile.cached + gl.minimum(row, last_row) // kind.GROUP
        first, end = visible_range(position, tile.num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK)
        acc, top, mass = attend_tile(
            acc, top, mass, q_tile, k_ring, v_ring, tile, first, end, scale, cap, kind
        )

    token, head = queries_of(tile, row, kind.GROUP)
    is_real = row < tile.num_rows
    if not kind.HAS_CAP:
        top = top * scale
    if HAS_SINKS:
        sink = gl.load(sinks + head) * LOG2_E
        higher = gl.maximum(top, sink)
        # Neither keys nor a sink: inf - inf is NaN.
        base = gl.where(higher == -float("inf"), 0.0, higher)
        kept_share = gl.exp2(top - base)
        mass = mass * kept_share + gl.exp2(sink - base)
        acc = scaled(acc, kept_share)
        top = higher
    has_keys = mass > 0
    mass = gl.where(has_keys, mass, 1.0)
    if HAS_LSE:
        value = gl.where(has_keys, (top + gl.log2(mass)) * LN_2, -float("inf"))
        gl.store(lse + token * lse_stride + head, value, mask=is_real)
    acc = scaled(acc, v_scale / mass)
    if kind.SPLIT_BLOCKS > 0:
        row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
        token, head = queries_of(tile, row, kind.GROUP)
        columns = gl.arange(0, kind.D, gl.SliceLayout(0, acc_layout))
        places = out + (token * out_stride + head * kind.D)[:, None] + columns[None, :]
        gl.store(places, acc, mask=(row < tile.num_rows)[:, None])
    else:
        # The queries are no longer needed: their shared memory turns the result into whole rows.
        q_tile.store(acc.to(out.dtype.element_ty))
        token, head = queries_of(tile, wide_row, kind.GROUP)
        places = whole_rows(out, token * out_stride + head * kind.D, kind.D, wide)
        gl.store(places, q_tile.load(wide), mask=(wide_row < tile.num_rows)[:, None])


@gluon.jit(
    do_not_specialize=["batch_size", "num_tokens", "num_tiles", "num_splits"],
    do_not_specialize_on_alignment=["rows", "cached_lens", "encoder_lens"],
)
def attend_hopper_tiles(
    q, q_stride, q_head_stride, k, k_stride, k_head_stride, v, v_stride, v_head_stride,
    out, out_stride, lse, lse_stride, sinks, slots, slots_stride,
    rows, cached_lens, encoder_lens, encoder_indptr, q_indptr, tile_request, tile_row, batch_size,
    num_tokens, num_tiles, num_splits, scale, cap, v_scale,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, IS_CAUSAL: gl.constexpr,
    IS_CROSS: gl.constexpr, IN_CALL: gl.constexpr, HAS_ENCODER: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, COPY_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Grid and arguments as of `attend_tiles`; num_warps=4, BLOCK_M=128, STAGES at least 2.

    q [T, Hq, D], k and v [slots, Hkv, D], out [T, Hq, D]: D is 64 or 128, all of one 16-bit dtype,
    rows at multiples of 16 bytes. lse, sinks, slots, rows, cached_lens, encoder_lens,
    encoder_indptr, q_indptr, tile_request and tile_row: as there. scale is above 0. REGISTERS and
    COPY_REGISTERS, multiples of 8: registers of each thread in the warps that multiply and in the
    COPY_WARPS that copy.
    """
    gl.static_assert(BLOCK_M == READERS * ROWS)
    kind = Kind(
        GROUP=GROUP, D=D, PAGE=PAGE, IS_CAUSAL=IS_CAUSAL, IS_CROSS=IS_CROSS, IN_CALL=IN_CALL,
        HAS_ENCODER=HAS_ENCODER, WINDOW=WINDOW, CHUNK=CHUNK, HAS_CAP=HAS_CAP,
        SPLIT_BLOCKS=SPLIT_BLOCKS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [READERS, ROWS, D], layout)
    k_ring = make_ring(dtype, BLOCK_N, D, STAGES, 32 * COPY_WARPS, READERS)
    v_ring = make_ring(dtype, BLOCK_N, D, STAGES, 32 * COPY_WARPS, READERS)
    tile = place_tile(
        cached_lens, encoder_lens, q_indptr, tile_request, tile_row,
        batch_size, num_tokens, num_tiles, num_splits, kind,
    )  # fmt: skip
    if SPLIT_BLOCKS > 0:
        split = gl.program_id(2).to(gl.int64)
        out += split * num_tokens * out_stride
        lse += split * num_tokens * lse_stride
    gl.warp_specialize(
        [
            (attend_rows, (
                q, q_stride, q_head_stride, out, out_stride, lse, lse_stride, sinks, scale, cap,
                v_scale, q_tiles, k_ring, v_ring, tile, kind, 0, HAS_SINKS, HAS_LSE,
            )),
            (attend_rows, (
                q, q_stride, q_head_stride, out, out_stride, lse, lse_stride, sinks, scale, cap,
                v_scale, q_tiles, k_ring, v_ring, tile, kind, 1, HAS_SINKS, HAS_LSE,
            )),
            (copy_keys, (
                k, k_stride, k_head_stride, v, v_stride, v_head_stride, slots, slots_stride, rows,
                encoder_lens, encoder_indptr, tile, k_ring, v_ring, kind,
            )),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
