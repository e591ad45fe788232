"""`attend_tiles` for Hopper GPUs, in Gluon, with copies and products in different warps.

One group of warps copies the keys' rows into shared memory, up to `STAGES` blocks ahead; one to
three warpgroups of 64 rows each multiply and compute the softmax. While the tensor cores work on
the values of a block, their warpgroup computes the softmax of the next one (Shah et al.,
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

from attnmux.triton.kernels.hopper.copies import (
    allocate_rows,
    copy_keys,
    make_ring,
    tail_width,
)
from attnmux.triton.kernels.hopper.places import Kind, place_tile, visible_range
from attnmux.triton.kernels.hopper.rescaling import rescaled
from attnmux.triton.kernels.hopper.rows import (
    ROWS,
    hold_queries,
    load_queries,
    queries_of,
    round_queries,
    store_result,
)
from attnmux.triton.kernels.hopper.weights import (
    LOG2_E,
    order_weights,
    pack,
    pack_quads,
    unpack,
    unpack_quads,
    weigh,
)

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def product_layout(width: int, bits: int) -> gl.NVMMADistributedLayout:
    """Of a warpgroup's products [ROWS, width]. bits: of a value of the operands."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 256 // bits])


@gluon.jit
def multiply_keys(q_parts, held, ring, at, layout: gl.constexpr):
    """Begin to compute a block's logits [ROWS, BLOCK_N]. held: the queries in registers by
    `hold_queries`, instead of q_parts[0]; empty if they are in shared memory."""
    keys = ring.block(at)
    logits = gl.full([ROWS, keys.shape[0]], 0.0, gl.float32, layout)
    if len(held) > 0:
        operand = held[0]
        if keys.dtype.primitive_bitwidth == 16:
            operand = as_operand(unpack(operand, keys.dtype), logits)
    else:
        operand = q_parts[0]
    logits = warpgroup_mma(operand, keys.permute([1, 0]), logits, use_acc=False, is_async=True)
    if ring.TAIL > 0:
        logits = warpgroup_mma(q_parts[1], ring.tail(at).permute([1, 0]), logits, is_async=True)
    return logits


@gluon.jit
def multiply_values(pairs, ring, at, accs):
    """Begin to add a block's weighted values to accs: [ROWS, D] and, with a tail, [ROWS, TAIL]."""
    values = ring.block(at)
    if values.dtype.primitive_bitwidth == 8:
        values = values.permute([1, 0])
        weights = unpack_quads(pairs)
    else:
        weights = unpack(pairs, values.dtype)
    acc = warpgroup_mma(as_operand(weights, accs[0]), values, accs[0], is_async=True)
    if ring.TAIL > 0:
        tail = accs[1]
        tail = warpgroup_mma(as_operand(weights, tail), ring.tail(at), tail, is_async=True)
        return acc, tail
    else:
        return (acc,)


@gluon.jit
def as_operand(weights, acc):
    """Weights as the left operand of a product that is added to acc."""
    NEXT_TO_EACH_OTHER: gl.constexpr = 32 // weights.dtype.primitive_bitwidth
    return gl.convert_layout(weights, gl.DotOperandLayout(0, acc.type.layout, NEXT_TO_EACH_OTHER))


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Weights of V's dtype in registers."""
    if dtype.primitive_bitwidth == 8:
        return pack_quads(order_weights(weights))
    else:
        return pack(weights, dtype)


@gluon.jit
def await_values(accs, weights):
    """The results of `multiply_values` and, computed by then, the next weights."""
    if len(accs) == 2:
        acc, tail, weights = warpgroup_mma_wait(0, deps=[accs[0], accs[1], weights])
        return (acc, tail), weights
    else:
        acc, weights = warpgroup_mma_wait(0, deps=[accs[0], weights])
        return (acc,), weights


@gluon.jit
def scaled(accs, share):
    acc = rescaled(accs[0], share)
    if len(accs) == 2:
        return acc, rescaled(accs[1], share)
    else:
        return (acc,)


@gluon.jit
def attend_turns(
    accs, top, mass, pairs, turn, last_turn, q_parts, held, k_ring, v_ring, tile, first, end, scale,
    cap,
    HIDES: gl.constexpr, kind,
    layout: gl.constexpr,
):  # fmt: skip
    """The turns of a tile after the first. Each begins with its own keys and the previous turn's
    values in shared memory, and with the previous turn's weights in registers."""
    for at in range(turn, last_turn):
        logits = multiply_keys(q_parts, held, k_ring, at, layout)
        accs = multiply_values(pairs, v_ring, at - 1, accs)
        logits = warpgroup_mma_wait(len(accs), deps=[logits])
        k_ring.release(at)
        weights, kept_share, top, mass = weigh(
            logits, top, mass, tile.stop - 1 - at, first, end, scale, cap, HIDES, kind
        )
        # Waits here and not where the rows are read: the assembler moves no part of the softmax
        # past the waits, where it would wait for the product.
        v_ring.await_full(at)
        k_ring.await_full(at + 1, at + 1 < tile.stop - tile.start)
        fence_async_shared()
        accs, weights = await_values(accs, weights)
        v_ring.release(at - 1)
        accs = scaled(accs, kept_share)
        pairs = packed(weights, v_ring.rows.dtype)
    return accs, top, mass, pairs


@gluon.jit
def attend_tile(
    accs, top, mass, q_parts, held, k_ring, v_ring, tile, first, end, scale, cap, kind
):  # fmt: skip
    """Add all of a tile's keys to the running softmax of its rows."""
    bits: gl.constexpr = k_ring.rows.dtype.primitive_bitwidth
    layout: gl.constexpr = product_layout(kind.BLOCK_N, bits)
    turns = tile.stop - tile.start
    k_ring.await_full(0)
    fence_async_shared()
    logits = warpgroup_mma_wait(0, deps=[multiply_keys(q_parts, held, k_ring, 0, layout)])
    k_ring.release(0)
    weights, _, top, mass = weigh(
        logits, top, mass, tile.stop - 1, first, end, scale, cap, True, kind
    )
    pairs = packed(weights, v_ring.rows.dtype)
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
        accs, top, mass, pairs = attend_turns(
            accs, top, mass, pairs, turn, last_turn, q_parts, held, k_ring, v_ring, tile, first,
            end, scale, cap, part != 1, kind, layout,
        )  # fmt: skip
    accs, _ = await_values(multiply_values(pairs, v_ring, turns - 1, accs), pairs)
    return accs, top, mass


@gluon.jit
def nothing_yet(WIDTH: gl.constexpr, bits: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, product_layout(WIDTH, bits))


@gluon.jit
def attend_rows(
    given, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, HOLDS_QUERIES: gl.constexpr, kind,
    PART: gl.constexpr,
):  # fmt: skip
    """Attend from the tile's rows that warpgroup PART has, and store the results."""
    queries, results, sinks, factors, rooms, tile = given
    q, q_stride, q_head_stride = queries
    out, out_stride, lse, lse_stride = results
    scale, cap, v_scale = factors
    q_tiles, q_tails, rounded_tiles, k_ring, v_ring = rooms
    bits: gl.constexpr = k_ring.rows.dtype.primitive_bitwidth
    rows_layout: gl.constexpr = gl.SliceLayout(1, product_layout(kind.BLOCK_N, bits))
    q_room = q_tiles.index(PART)
    q_parts = (rounded_tiles.index(PART), q_tails.index(PART))
    row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, rows_layout)
    accs = (nothing_yet(kind.D, v_ring.rows.dtype.primitive_bitwidth),)
    if kind.V_TAIL > 0:
        accs = (accs[0], nothing_yet(v_ring.TAIL, 16))
    top = gl.full([ROWS], -float("inf"), gl.float32, rows_layout)
    mass = gl.zeros([ROWS], gl.float32, rows_layout)
    if kind.ROUNDS_QUERIES:
        scale = scale * gl.full([ROWS], 1.0, gl.float32, rows_layout)
    if tile.stop > tile.start:
        if kind.ROUNDS_QUERIES:
            divisor = round_queries(q, q_stride, q_head_stride, tile, q_parts[0], PART, kind)
            scale = scale * gl.convert_layout(divisor, rows_layout)
        else:
            load_queries(q, q_stride, q_head_stride, tile, q_room, PART, kind.D, kind)
        if kind.K_TAIL > 0:
            of_tail = q + kind.D
            load_queries(
                of_tail, q_stride, q_head_stride, tile, q_parts[1], PART, kind.K_TAIL, kind
            )
        fence_async_shared()
        held = ()
        if HOLDS_QUERIES:
            held = (hold_queries(q_parts[0], product_layout(kind.BLOCK_N, bits)),)
        position = tile.cached + gl.minimum(row, tile.num_rows - 1) // kind.GROUP
        first, end = visible_range(position, tile.num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK)
        accs, top, mass = attend_tile(
            accs, top, mass, q_parts, held, k_ring, v_ring, tile, first, end, scale, cap, kind
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
        accs = scaled(accs, kept_share)
        top = higher
    has_keys = mass > 0
    mass = gl.where(has_keys, mass, 1.0)
    if HAS_LSE:
        value = gl.where(has_keys, (top + gl.log2(mass)) * LN_2, -float("inf"))
        gl.store(lse + token * lse_stride + head, value, mask=is_real)
    accs = scaled(accs, v_scale / mass)
    # The queries are no longer needed: the results take their shared memory.
    store_result(out, out_stride, accs[0], tile, q_room, PART, kind.D, kind)
    if kind.V_TAIL > 0:
        store_result(out + kind.D, out_stride, accs[1], tile, q_parts[1], PART, kind.V_TAIL, kind)


@gluon.jit(
    do_not_specialize=["batch_size", "num_tokens", "num_tiles", "num_splits"],
    do_not_specialize_on_alignment=["rows", "v_starts", "cached_lens", "encoder_lens"],
)
def attend_hopper_tiles(
    q, q_stride, q_head_stride, k, k_stride, k_head_stride, v, v_stride, v_head_stride,
    out, out_stride, lse, lse_stride, sinks, slots, slots_stride,
    rows, v_starts, cached_lens, encoder_lens, encoder_indptr, q_indptr, tile_request, tile_row,
    batch_size, num_tokens, num_tiles, num_splits, scale, cap, v_scale,
    GROUP: gl.constexpr, D: gl.constexpr, REAL_TAIL: gl.constexpr, REAL_DV: gl.constexpr,
    PAGE: gl.constexpr, IS_CAUSAL: gl.constexpr,
    IS_CROSS: gl.constexpr, IN_CALL: gl.constexpr, HAS_ENCODER: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, COPY_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, SPLIT_BLOCKS: gl.constexpr,
    HOLDS_QUERIES: gl.constexpr,
):  # fmt: skip
    """Grid and arguments as of `attend_tiles`; num_warps=4, BLOCK_M 64, 128 or 192, STAGES 2 or
    more.

    q [T, Hq, D + REAL_TAIL], k [slots, Hkv, D + REAL_TAIL], v [slots, Hkv, REAL_DV], out [T, Hq,
    REAL_DV]: all of one 16-bit dtype, rows at multiples of 16 bytes. D is 64, 128 or 256, and
    REAL_DV is D or D + REAL_TAIL. lse, sinks, slots, rows, cached_lens, encoder_lens,
    encoder_indptr, q_indptr, tile_request and tile_row: as there. scale is above 0. REGISTERS and
    COPY_REGISTERS, multiples of 8: registers of each thread in the warps that multiply and in the
    COPY_WARPS that copy.
    """
    READERS: gl.constexpr = BLOCK_M // ROWS
    gl.static_assert(BLOCK_M == READERS * ROWS and READERS <= 3)
    ROUNDS_QUERIES: gl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8
    ROUNDS_WEIGHTS: gl.constexpr = v.dtype.element_ty.primitive_bitwidth == 8
    gl.static_assert(ROUNDS_QUERIES or not ROUNDS_WEIGHTS)
    gl.static_assert(not ROUNDS_QUERIES or REAL_TAIL == 0)
    kind = Kind(
        GROUP=GROUP, D=D, K_TAIL=REAL_TAIL, V_TAIL=REAL_DV - D, PAGE=PAGE,
        IS_CAUSAL=IS_CAUSAL, IS_CROSS=IS_CROSS, IN_CALL=IN_CALL,
        HAS_ENCODER=HAS_ENCODER, WINDOW=WINDOW, CHUNK=CHUNK, HAS_CAP=HAS_CAP,
        SPLIT_BLOCKS=SPLIT_BLOCKS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        ROUNDS_QUERIES=ROUNDS_QUERIES, ROUNDS_WEIGHTS=ROUNDS_WEIGHTS,
    )  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    k_dtype: gl.constexpr = k.dtype.element_ty
    q_tiles = allocate_rows(dtype, READERS, ROWS, D)
    rounded_tiles = q_tiles
    if ROUNDS_QUERIES:
        rounded_tiles = allocate_rows(k_dtype, READERS, ROWS, D)
    q_tails = q_tiles
    if REAL_TAIL > 0:
        q_tails = allocate_rows(dtype, READERS, ROWS, tail_width(REAL_TAIL))
    k_ring = make_ring(k_dtype, BLOCK_N, D, REAL_TAIL, STAGES, 32 * COPY_WARPS, READERS)
    if ROUNDS_WEIGHTS:
        v_ring = make_ring(k_dtype, D, BLOCK_N, 0, STAGES, 32 * COPY_WARPS, READERS)
    else:
        v_ring = make_ring(dtype, BLOCK_N, D, REAL_DV - D, STAGES, 32 * COPY_WARPS, READERS)
    tile = place_tile(
        cached_lens, encoder_lens, q_indptr, tile_request, tile_row,
        batch_size, num_tokens, num_tiles, num_splits, kind,
    )  # fmt: skip
    if SPLIT_BLOCKS > 0:
        split = gl.program_id(2).to(gl.int64)
        out += split * num_tokens * out_stride
        lse += split * num_tokens * lse_stride
    queries = (q, q_stride, q_head_stride)
    results = (out, out_stride, lse, lse_stride)
    factors = (scale, cap, v_scale)
    rooms = (q_tiles, q_tails, rounded_tiles, k_ring, v_ring)
    copied = (
        k, k_stride, k_head_stride, v, v_stride, v_head_stride, slots, slots_stride, rows,
        v_starts, encoder_lens, encoder_indptr, tile, k_ring, v_ring, kind,
    )  # fmt: skip
    given = (queries, results, sinks, factors, rooms, tile)
    if READERS == 1:
        gl.warp_specialize(
            [
                (attend_rows, (given, HAS_SINKS, HAS_LSE, HOLDS_QUERIES, kind, 0)),
                (copy_keys, copied),
            ],
            [COPY_WARPS],
            [COPY_REGISTERS],
        )
    elif READERS == 2:
        gl.warp_specialize(
            [
                (attend_rows, (given, HAS_SINKS, HAS_LSE, HOLDS_QUERIES, kind, 0)),
                (attend_rows, (given, HAS_SINKS, HAS_LSE, HOLDS_QUERIES, kind, 1)),
                (copy_keys, copied),
            ],
            [4, COPY_WARPS],
            [REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend_rows, (given, HAS_SINKS, HAS_LSE, HOLDS_QUERIES, kind, 0)),
                (attend_rows, (given, HAS_SINKS, HAS_LSE, HOLDS_QUERIES, kind, 1)),
                (attend_rows, (given, HAS_SINKS, HAS_LSE, HOLDS_QUERIES, kind, 2)),
                (copy_keys, copied),
            ],
            [4, 4, COPY_WARPS],
            [REGISTERS, REGISTERS, COPY_REGISTERS],
        )
