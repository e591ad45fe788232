"""Attention of few tokens a request over a latent pool on Hopper GPUs, in Gluon: `attend_shares`
with its copies and its products in warps of their own.

A tile of 64 rows of queries is as much as the registers hold: its result is 64 x 512 float32, half
of it with each of two warpgroups. The first takes the logits and the softmax, and hands the weights
to the second through shared memory; either multiplies them with its half of the values, which are
the keys' own columns. A third group of warps copies the rows of the keys into shared memory,
`STAGES` blocks ahead, past the end of an item. What of an item a program did not see alone it
leaves as a partial result, which `merge_latent` merges afterwards: with a slice of rows and columns
to each of its programs, for the parts of a long request are megabytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2 = tl.constexpr(0.6931471805599453)
STATE = gl.constexpr(8)
"""As `shares.STATE`."""
ROWS = gl.constexpr(64)
"""Of a tile: those of a warpgroup's matrix instruction."""
BLOCK_N = gl.constexpr(64)
"""Keys of a block."""
RANK = gl.constexpr(512)
HALF = gl.constexpr(256)
"""Columns of the result that a warpgroup has."""
ROPE = gl.constexpr(64)
COPY_WARPS = gl.constexpr(4)


@gluon.jit
def first_unit(starts, share):
    """What `plan_shares` says of a program: see there."""
    program = gl.program_id(0)
    start_of = starts + program * STATE
    begin = program * gl.load(share)
    request = gl.load(start_of)
    before = gl.load(start_of + 1)
    units = gl.load(start_of + 2)
    blocks_each = gl.load(start_of + 3)
    cached = gl.load(start_of + 4)
    num_keys = gl.load(start_of + 5)
    row = gl.load(start_of + 6)
    last = gl.load(start_of + 7)
    return begin, last, request, before, units, blocks_each, cached, num_keys, row


@gluon.jit
def place_unit(
    unit, last, before, units, blocks_each, num_keys, ITEMS: gl.constexpr, IS_FIXED: gl.constexpr
):
    """The item that a unit is of, where the item begins, how many of its units to take now, and
    which keys those are."""
    item = (unit - before * ITEMS) // units
    item_begin = before * ITEMS + item * units
    done = unit - item_begin
    count = gl.minimum(units - done, last - unit)
    if IS_FIXED:
        count = gl.minimum(count, 1)
    start = done * blocks_each * BLOCK_N
    stop = gl.minimum(start + count * blocks_each * BLOCK_N, num_keys)
    turns = gl.maximum(stop - start + BLOCK_N - 1, 0) // BLOCK_N
    return item, item_begin, count, start, turns


@gluon.jit
def next_unit(
    unit,
    last,
    request,
    before,
    units,
    blocks_each,
    cached,
    num_keys,
    row,
    stops,
    unit_blocks,
    lens,
    rows,
    ITEMS: gl.constexpr,
    QUERIES: gl.constexpr,
    LENS_SHIFT: gl.constexpr,
):
    if unit == (before + units) * ITEMS:
        request += 1
        if unit < last:
            before += units
            units = gl.load(stops + request + 1) - before
            blocks_each = gl.load(unit_blocks + request)
            cached = gl.load(lens + request) + LENS_SHIFT
            num_keys = cached + QUERIES
            row = request
            if rows is not None:
                row = gl.load(rows + request).to(gl.int32)
    return request, before, units, blocks_each, cached, num_keys, row


@gluon.jit
def copy_columns(base, offsets, to, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Rows of a matrix into shared memory, 16 bytes a thread at a time."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    places = offsets[:, None] + columns[None, :]
    places = base + gl.max_contiguous(gl.multiple_of(places, [1, 8]), [1, 8])
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(to, places)


@gluon.jit
def produce(
    q,
    q_stride,
    q_head_stride,
    q_tail,
    q_tail_stride,
    q_tail_head_stride,
    k,
    k_stride,
    slots,
    slots_stride,
    rows,
    lens,
    stops,
    unit_blocks,
    starts,
    share,
    q_halves,
    q_rope,
    k_left,
    k_right,
    k_rope,
    q_full,
    q_free,
    left_full,
    left_free,
    right_full,
    right_free,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    LENS_SHIFT: gl.constexpr,
    IS_FIXED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy the queries of every item, and the rows of its keys."""
    NUM_ROWS: gl.constexpr = QUERIES * GROUP
    ITEMS: gl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [COPY_WARPS, 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    index = gl.arange(0, BLOCK_N, rows_layout)
    unit, last, request, before, units, blocks_each, cached, num_keys, row = first_unit(
        starts, share
    )
    done = 0
    filled = 0
    while unit < last:
        item, item_begin, count, start, turns = place_unit(
            unit, last, before, units, blocks_each, num_keys, ITEMS, IS_FIXED
        )
        table = slots + row.to(gl.int64) * slots_stride
        for turn in range(turns):
            # Keys behind the last are copies of it. Their slots arrive while the ring is full.
            keys = gl.minimum(start + turn * BLOCK_N + index, num_keys - 1)
            offsets = gl.load(table + keys).to(gl.int64) * k_stride
            stage = done % STAGES
            free = done // STAGES % 2 ^ 1
            mbarrier.wait(left_free.index(stage), free)
            copy_columns(k + RANK, offsets, k_rope.index(stage), ROPE, layout)
            copy_columns(k, offsets, k_left.index(stage), HALF, layout)
            async_copy.mbarrier_arrive(left_full.index(stage), increment_count=False)
            mbarrier.wait(right_free.index(stage), free)
            copy_columns(k + HALF, offsets, k_right.index(stage), HALF, layout)
            async_copy.mbarrier_arrive(right_full.index(stage), increment_count=False)
            if turn == 0:
                # Rows behind the last are copies of it.
                at = gl.minimum(item * ROWS + gl.arange(0, ROWS, rows_layout), NUM_ROWS - 1)
                token = (request * QUERIES + at // GROUP).to(gl.int64)
                head = (at % GROUP).to(gl.int64)
                of_q = token * q_stride + head * q_head_stride
                of_tail = token * q_tail_stride + head * q_tail_head_stride
                mbarrier.wait(q_free, filled % 2 ^ 1)
                copy_columns(q_tail, of_tail, q_rope, ROPE, layout)
                copy_columns(q, of_q, q_halves.index(0), HALF, layout)
                copy_columns(q + HALF, of_q, q_halves.index(1), HALF, layout)
                async_copy.mbarrier_arrive(q_full, increment_count=False)
                filled += 1
            done += 1
        unit += count
        request, before, units, blocks_each, cached, num_keys, row = next_unit(
            unit,
            last,
            request,
            before,
            units,
            blocks_each,
            cached,
            num_keys,
            row,
            stops,
            unit_blocks,
            lens,
            rows,
            ITEMS,
            QUERIES,
            LENS_SHIFT,
        )


@gluon.jit
def store_half(
    acc,
    top,
    mass,
    out,
    out_stride,
    lse,
    lse_stride,
    partial,
    partial_lse,
    unit,
    request,
    item,
    item_begin,
    begin,
    is_whole,
    v_scale,
    PART: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    HAS_LSE: gl.constexpr,
    IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr,
):
    """Half of a tile's columns: to out [T, Hq, 512], or as a part of an item. top in log 2."""
    NUM_ROWS: gl.constexpr = QUERIES * GROUP
    layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    columns = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = gl.arange(0, ROWS, rows_layout)
    has_keys = mass > 0
    safe = gl.where(has_keys, mass, 1.0)
    if is_whole:
        row = item * ROWS + at
        is_real = row < NUM_ROWS
        token = request * QUERIES + row // GROUP
        head = row % GROUP
        places = token.to(gl.int64) * out_stride + head * RANK
        values = acc * (v_scale / safe)[:, None]
        gl.store(
            out + places[:, None] + columns[None, :],
            values.to(out.dtype.element_ty),
            mask=is_real[:, None],
        )
        if HAS_LSE and PART == 0:
            value = gl.where(has_keys, (top + gl.log2(safe)) * LN_2, -float("inf"))
            gl.store(lse + token.to(gl.int64) * lse_stride + head, value, mask=is_real)
    else:
        place = 2 * gl.program_id(0) + (item_begin > begin).to(gl.int32)
        if IS_FIXED:
            place = unit
        part_rows = place.to(gl.int64) * PART_ROWS + at
        keeps = at < PART_ROWS
        gl.store(
            partial + part_rows[:, None] * RANK + columns[None, :],
            acc * (1.0 / safe)[:, None],
            mask=keeps[:, None],
        )
        if PART == 0:
            part_lse = gl.where(has_keys, top + gl.log2(safe), -float("inf"))
            gl.store(partial_lse + part_rows, part_lse, mask=keeps)


@gluon.jit
def weigh(logits, top, mass, first_key, end, least_end, scale):
    """A block's weights, and what is left of those before it; top is in the logits' unit."""
    if first_key + BLOCK_N > least_end:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(keys[None, :] < end[:, None], logits, -float("inf"))
    higher = gl.maximum(top, gl.max(logits, 1))
    # A row that has seen nothing yet: the difference of two infinities is no number.
    base = gl.where(higher == -float("inf"), 0.0, higher) * scale
    weights = gl.exp2(logits * scale - base[:, None])
    kept_share = gl.exp2(top * scale - base)
    mass = mass * kept_share + gl.sum(weights, 1)
    return weights, kept_share, higher, mass


@gluon.jit
def lead(
    out,
    out_stride,
    lse,
    lse_stride,
    rows,
    lens,
    stops,
    unit_blocks,
    starts,
    share,
    partial,
    partial_lse,
    scale,
    v_scale,
    q_halves,
    q_rope,
    k_left,
    k_right,
    k_rope,
    handed,
    handed_rows,
    q_full,
    q_free,
    left_full,
    left_free,
    right_full,
    handed_full,
    handed_free,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    LENS_SHIFT: gl.constexpr,
    HAS_LSE: gl.constexpr,
    IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Logits and softmax of every item, and the left half of its result."""
    NUM_ROWS: gl.constexpr = QUERIES * GROUP
    ITEMS: gl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    at = gl.arange(0, ROWS, rows_layout)
    unit, last, request, before, units, blocks_each, cached, num_keys, row = first_unit(
        starts, share
    )
    begin = unit
    done = 0
    filled = 0
    turns_handed = 0
    while unit < last:
        item, item_begin, count, start, turns = place_unit(
            unit, last, before, units, blocks_each, num_keys, ITEMS, IS_FIXED
        )
        acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
        top = gl.full([ROWS], -float("inf"), gl.float32, rows_layout)
        mass = gl.zeros([ROWS], gl.float32, rows_layout)
        order = gl.minimum(item * ROWS + at, NUM_ROWS - 1) // GROUP
        end = cached + order + 1
        least_end = cached + item * ROWS // GROUP + 1
        if turns > 0:
            mbarrier.wait(q_full, filled % 2)
            filled += 1
        for turn in range(turns):
            stage = done % STAGES
            phase = done // STAGES % 2
            mbarrier.wait(left_full.index(stage), phase)
            fence_async_shared()
            logits = gl.zeros([ROWS, BLOCK_N], gl.float32, logits_layout)
            logits = warpgroup_mma(
                q_rope,
                k_rope.index(stage).permute([1, 0]),
                logits,
                use_acc=False,
                is_async=True,
            )
            logits = warpgroup_mma(
                q_halves.index(0), k_left.index(stage).permute([1, 0]), logits, is_async=True
            )
            mbarrier.wait(right_full.index(stage), phase)
            fence_async_shared()
            logits = warpgroup_mma(
                q_halves.index(1), k_right.index(stage).permute([1, 0]), logits, is_async=True
            )
            logits = warpgroup_mma_wait(0, deps=[logits])
            if turn == turns - 1:
                mbarrier.arrive(q_free)
            weights, kept_share, top, mass = weigh(
                logits, top, mass, start + turn * BLOCK_N, end, least_end, scale
            )
            weights = weights.to(q_rope.dtype)
            mbarrier.wait(handed_free, turns_handed % 2 ^ 1)
            handed.store(weights)
            handed_rows.index(0).store(kept_share)
            fence_async_shared()
            mbarrier.arrive(handed_full)
            turns_handed += 1
            acc = acc * gl.convert_layout(kept_share, acc_rows)[:, None]
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2))
            acc = warpgroup_mma(operand, k_left.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(left_free.index(stage))
            done += 1
        top = top * scale
        mbarrier.wait(handed_free, turns_handed % 2 ^ 1)
        handed_rows.index(0).store(mass)
        mbarrier.arrive(handed_full)
        turns_handed += 1
        store_half(
            acc,
            gl.convert_layout(top, acc_rows),
            gl.convert_layout(mass, acc_rows),
            out,
            out_stride,
            lse,
            lse_stride,
            partial,
            partial_lse,
            unit,
            request,
            item,
            item_begin,
            begin,
            count == units,
            v_scale,
            0,
            GROUP,
            QUERIES,
            HAS_LSE,
            IS_FIXED,
            PART_ROWS,
        )
        unit += count
        request, before, units, blocks_each, cached, num_keys, row = next_unit(
            unit,
            last,
            request,
            before,
            units,
            blocks_each,
            cached,
            num_keys,
            row,
            stops,
            unit_blocks,
            lens,
            rows,
            ITEMS,
            QUERIES,
            LENS_SHIFT,
        )


@gluon.jit
def follow(
    out,
    out_stride,
    lse,
    lse_stride,
    rows,
    lens,
    stops,
    unit_blocks,
    starts,
    share,
    partial,
    partial_lse,
    v_scale,
    k_right,
    handed,
    handed_rows,
    right_full,
    right_free,
    handed_full,
    handed_free,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    LENS_SHIFT: gl.constexpr,
    HAS_LSE: gl.constexpr,
    IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The right half of every item's result."""
    ITEMS: gl.constexpr = (QUERIES * GROUP + ROWS - 1) // ROWS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    unit, last, request, before, units, blocks_each, cached, num_keys, row = first_unit(
        starts, share
    )
    begin = unit
    done = 0
    turns_handed = 0
    while unit < last:
        item, item_begin, count, start, turns = place_unit(
            unit, last, before, units, blocks_each, num_keys, ITEMS, IS_FIXED
        )
        acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
        for turn in range(turns):
            stage = done % STAGES
            mbarrier.wait(right_full.index(stage), done // STAGES % 2)
            mbarrier.wait(handed_full, turns_handed % 2)
            fence_async_shared()
            kept_share = handed_rows.index(0).load(acc_rows)
            acc = acc * kept_share[:, None]
            acc = warpgroup_mma(handed, k_right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(handed_free)
            mbarrier.arrive(right_free.index(stage))
            turns_handed += 1
            done += 1
        mbarrier.wait(handed_full, turns_handed % 2)
        mass = handed_rows.index(0).load(acc_rows)
        mbarrier.arrive(handed_free)
        turns_handed += 1
        store_half(
            acc,
            mass,
            mass,
            out,
            out_stride,
            lse,
            lse_stride,
            partial,
            partial_lse,
            unit,
            request,
            item,
            item_begin,
            begin,
            count == units,
            v_scale,
            1,
            GROUP,
            QUERIES,
            HAS_LSE,
            IS_FIXED,
            PART_ROWS,
        )
        unit += count
        request, before, units, blocks_each, cached, num_keys, row = next_unit(
            unit,
            last,
            request,
            before,
            units,
            blocks_each,
            cached,
            num_keys,
            row,
            stops,
            unit_blocks,
            lens,
            rows,
            ITEMS,
            QUERIES,
            LENS_SHIFT,
        )


@gluon.jit
def attend_latent(
    q,
    q_stride,
    q_head_stride,
    q_tail,
    q_tail_stride,
    q_tail_head_stride,
    k,
    k_stride,
    out,
    out_stride,
    lse,
    lse_stride,
    slots,
    slots_stride,
    rows,
    lens,
    stops,
    unit_blocks,
    starts,
    share,
    partial,
    partial_lse,
    scale,
    v_scale,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    LENS_SHIFT: gl.constexpr,
    HAS_LSE: gl.constexpr,
    IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Grid: as many programs as `plan_shares` planned for, with blocks of 64 keys. num_warps=4.

    q [T, GROUP, 512] and q_tail [T, GROUP, 64]; k [slots, 576], whose first 512 columns are the
    values: of one 16-bit dtype, rows at multiples of 16 bytes. slots: page size 1. scale: times
    log2(e), above 0. What is left as parts `merge_latent` merges.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_halves = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], half)
    q_rope = gl.allocate_shared_memory(dtype, [ROWS, ROPE], narrow)
    k_left = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half)
    k_right = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half)
    k_rope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], narrow)
    handed = gl.allocate_shared_memory(dtype, [ROWS, BLOCK_N], narrow)
    handed_rows = gl.allocate_shared_memory(gl.float32, [1, ROWS], plain)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    handed_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    handed_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, COPY_WARPS * 32)
    mbarrier.init(q_free, 1)
    mbarrier.init(handed_full, 1)
    mbarrier.init(handed_free, 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(left_full.index(stage), COPY_WARPS * 32)
        mbarrier.init(right_full.index(stage), COPY_WARPS * 32)
        mbarrier.init(left_free.index(stage), 1)
        mbarrier.init(right_free.index(stage), 1)
    # fmt: off
    gl.warp_specialize(
        [
            (lead, (
                out, out_stride, lse, lse_stride, rows, lens, stops, unit_blocks, starts, share,
                partial, partial_lse, scale, v_scale, q_halves, q_rope, k_left, k_right, k_rope,
                handed, handed_rows, q_full, q_free, left_full, left_free, right_full,
                handed_full, handed_free,
                GROUP, QUERIES, LENS_SHIFT, HAS_LSE, IS_FIXED, PART_ROWS, STAGES,
            )),
            (follow, (
                out, out_stride, lse, lse_stride, rows, lens, stops, unit_blocks, starts, share,
                partial, partial_lse, v_scale, k_right, handed, handed_rows, right_full, right_free,
                handed_full, handed_free,
                GROUP, QUERIES, LENS_SHIFT, HAS_LSE, IS_FIXED, PART_ROWS, STAGES,
            )),
            (produce, (
                q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride, k, k_stride,
                slots, slots_stride, rows, lens, stops, unit_blocks, starts, share, q_halves,
                q_rope, k_left, k_right, k_rope, q_full, q_free, left_full, left_free, right_full,
                right_free,
                GROUP, QUERIES, LENS_SHIFT, IS_FIXED, STAGES,
            )),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )
    # fmt: on


@triton.jit
def merge_latent(
    out,
    out_stride,
    lse,
    lse_stride,
    stops,
    share,
    partial,
    partial_lse,
    v_scale,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IS_FIXED: tl.constexpr,
    PART_ROWS: tl.constexpr,
    SLICE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The softmax over the parts of every item. Grid: [items of all requests, slices of an item];
    a slice is SLICE_ROWS x COLUMNS of PART_ROWS x 512, and its parts are added PARTS at a time."""
    TILE: tl.constexpr = 64
    WIDTH: tl.constexpr = 512
    ITEMS: tl.constexpr = (QUERIES * GROUP + TILE - 1) // TILE
    ACROSS: tl.constexpr = WIDTH // COLUMNS
    request = tl.program_id(0) // ITEMS
    item = tl.program_id(0) % ITEMS
    before = tl.load(stops + request)
    units = tl.load(stops + request + 1) - before
    begin = before * ITEMS + item * units
    first_part = begin
    last_part = begin + units - 1
    taken = 1
    if not IS_FIXED:
        taken = tl.load(share)
        first_part = first_part // taken
        last_part = last_part // taken
    if first_part < last_part:
        rows = tl.program_id(1) // ACROSS * SLICE_ROWS + tl.arange(0, SLICE_ROWS)
        columns = tl.program_id(1) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([SLICE_ROWS, COLUMNS], tl.float32)
        top = tl.full([SLICE_ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([SLICE_ROWS], tl.float32)
        for start in range(first_part, last_part + 1, PARTS):
            part = start + tl.arange(0, PARTS)
            is_part = part <= last_part
            # The item is the first that its program works on, or the last.
            place = part if IS_FIXED else 2 * part + (begin > part * taken).to(tl.int32)
            row = place.to(tl.int64)[:, None] * PART_ROWS + rows[None, :]
            part_lse = tl.load(partial_lse + row, mask=is_part[:, None], other=-float("inf"))
            values = tl.load(
                partial + row[:, :, None] * WIDTH + columns[None, None, :],
                mask=is_part[:, None, None],
                other=0.0,
            )
            higher = tl.maximum(top, tl.max(part_lse, 0))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2(part_lse - base[None, :])
            kept_share = tl.exp2(top - base)
            mass = mass * kept_share + tl.sum(weights, 0)
            acc = acc * kept_share[:, None] + tl.sum(values * weights[:, :, None], 0)
            top = higher
        row = item * TILE + rows
        is_real = row < QUERIES * GROUP
        token = request * QUERIES + row // GROUP
        head = row % GROUP
        has_keys = mass > 0
        safe = tl.where(has_keys, mass, 1.0)
        places = token.to(tl.int64) * out_stride + head * WIDTH
        tl.store(
            out + places[:, None] + columns[None, :],
            (acc * (v_scale / safe)[:, None]).to(out.dtype.element_ty),
            mask=is_real[:, None],
        )
        if HAS_LSE:
            if tl.program_id(1) % ACROSS == 0:
                value = tl.where(has_keys, (top + tl.log2(safe)) * LN_2, -float("inf"))
                tl.store(lse + token.to(tl.int64) * lse_stride + head, value, mask=is_real)
