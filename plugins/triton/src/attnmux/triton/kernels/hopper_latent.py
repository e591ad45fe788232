"""`attend_shares` for absorbed MLA on Hopper GPUs, in Gluon, with copies and products in different
warps.

A tile of 64 rows of queries fills the registers: its result is 64 x 512 float32, half of it in each
of two warpgroups. `lead` computes logits and softmax, and passes the weights to `follow` through
shared memory; each multiplies them with its half of the values, which are columns of the keys.
`produce` copies the rows of the keys into shared memory, `STAGES` blocks ahead, past the end of an
item. Partial results of an item are left to `merge_latent`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from attnmux.triton.kernels.hopper_walk import first_unit, next_request, place_unit

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
"""Rows of a tile, which are those of a warpgroup's matrix instruction."""
BLOCK_N = gl.constexpr(64)
"""Keys of a block."""
RANK = gl.constexpr(512)
HALF = gl.constexpr(256)
"""Columns of the result in a warpgroup."""
ROPE = gl.constexpr(64)
LARGE = gl.constexpr(2.0**100)
"""A power of 2: its product with the scale has no rounding, however the compiler fuses it."""
COPY_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def sides(items, is_fixed):
    """Programs that take the same keys side by side, each for an item of its own, so that they read
    them from L2 at the same time. Fixed splits have their items in the line instead."""
    return 1 if is_fixed else items


@gluon.jit
def copy_columns(base, offsets, is_there, to, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Copy rows of a matrix into shared memory, 16 bytes a thread at a time; 0 where is_there is
    False. is_there: None where all are there."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    places = offsets[:, None] + columns[None, :]
    places = base + gl.max_contiguous(gl.multiple_of(places, [1, 8]), [1, 8])
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])
    if is_there is None:
        async_copy.async_copy_global_to_shared(to, places)
    else:
        async_copy.async_copy_global_to_shared(to, places, mask=is_there[:, None])


@gluon.jit
def produce(
    queries, keys, plan, q_room, k_room, q_turns, left_turns, right_turns,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr, IS_FIXED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy every item's queries, and the rows of its keys."""
    q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride = queries
    k, k_stride, slots, slots_stride = keys
    q_halves, q_rope = q_room
    k_left, k_right, k_rope = k_room
    q_full, q_free = q_turns
    left_full, left_free = left_turns
    right_full, right_free = right_turns
    NUM_ROWS: gl.constexpr = QUERIES * GROUP
    ITEMS: gl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    SIDES: gl.constexpr = sides(ITEMS, IS_FIXED)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [COPY_WARPS, 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    index = gl.arange(0, BLOCK_N, rows_layout)
    program, side = gl.program_id(0) // SIDES, gl.program_id(0) % SIDES
    unit, last, of_request = first_unit(plan, program)
    done = 0
    filled = 0
    while unit < last:
        item, _begin, count, start, turns = place_unit(
            unit, last, of_request, ITEMS // SIDES, IS_FIXED, BLOCK_N
        )
        item += side
        num_keys, row = of_request[5], of_request[6]
        table = slots + row.to(gl.int64) * slots_stride
        for turn in range(turns):
            # Keys after the last are copies of it. Their slots arrive while the ring is full.
            at = gl.minimum(start + turn * BLOCK_N + index, num_keys - 1)
            offsets = gl.load(table + at).to(gl.int64) * k_stride
            stage = done % STAGES
            free = done // STAGES % 2 ^ 1
            mbarrier.wait(left_free.index(stage), free)
            copy_columns(k + RANK, offsets, None, k_rope.index(stage), ROPE, layout)
            copy_columns(k, offsets, None, k_left.index(stage), HALF, layout)
            async_copy.mbarrier_arrive(left_full.index(stage), increment_count=False)
            mbarrier.wait(right_free.index(stage), free)
            copy_columns(k + HALF, offsets, None, k_right.index(stage), HALF, layout)
            async_copy.mbarrier_arrive(right_full.index(stage), increment_count=False)
            if turn == 0:
                # Rows after the last are 0: products of zeros take less power, and power limits
                # the clock.
                q_row = item * ROWS + index
                is_real = q_row < NUM_ROWS
                q_row = gl.minimum(q_row, NUM_ROWS - 1)
                token = (of_request[0] * QUERIES + q_row // GROUP).to(gl.int64)
                head = (q_row % GROUP).to(gl.int64)
                of_q = token * q_stride + head * q_head_stride
                of_tail = token * q_tail_stride + head * q_tail_head_stride
                mbarrier.wait(q_free, filled % 2 ^ 1)
                copy_columns(q_tail, of_tail, is_real, q_rope, ROPE, layout)
                copy_columns(q, of_q, is_real, q_halves.index(0), HALF, layout)
                copy_columns(q + HALF, of_q, is_real, q_halves.index(1), HALF, layout)
                async_copy.mbarrier_arrive(q_full, increment_count=False)
                filled += 1
            done += 1
        unit += count
        of_request = next_request(unit, last, of_request, plan, ITEMS // SIDES, QUERIES, LENS_SHIFT)


@gluon.jit
def store_half(
    acc, top, mass, results, unit, request, item, item_begin, begin, is_whole,
    PART: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr, IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr,
):  # fmt: skip
    """Store half of a tile's columns to out [T, Hq, 512], or as a partial result.

    acc [64, 256], top and mass [64]; top in units of log 2.
    """
    out, out_stride, lse, lse_stride, partial, partial_lse, v_scale = results
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
        if lse is not None and PART == 0:
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
    """A block's weights [64, 64], the factor [64] of the earlier ones, and the new top and mass.

    top is in the logits' unit, which times scale is that of log 2.
    """
    if first_key + BLOCK_N > least_end:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(keys[None, :] < end[:, None], logits, -float("inf"))
    higher = gl.maximum(top, gl.max(logits, 1))
    # A row that has seen no key yet: inf - inf is NaN.
    base = gl.where(higher == -float("inf"), 0.0, higher) * scale
    weights = gl.exp2(logits * scale - base[:, None])
    kept_share = gl.exp2(top * scale - base)
    mass = mass * kept_share + gl.sum(weights, 1)
    return weights, kept_share, higher, mass


@gluon.jit
def lead(
    results, scale, plan, q_room, k_room, handed, handed_rows, q_turns, left_turns, right_turns,
    handed_turns,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr, IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute every item's logits and softmax, and the left half of its result."""
    q_halves, q_rope = q_room
    k_left, k_right, k_rope = k_room
    q_full, q_free = q_turns
    left_full, left_free = left_turns
    right_full, _right_free = right_turns
    handed_full, handed_free = handed_turns
    NUM_ROWS: gl.constexpr = QUERIES * GROUP
    ITEMS: gl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    SIDES: gl.constexpr = sides(ITEMS, IS_FIXED)
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    at = gl.arange(0, ROWS, rows_layout)
    program, side = gl.program_id(0) // SIDES, gl.program_id(0) % SIDES
    unit, last, of_request = first_unit(plan, program)
    begin = unit
    done = 0
    filled = 0
    turns_handed = 0
    while unit < last:
        item, item_begin, count, start, turns = place_unit(
            unit, last, of_request, ITEMS // SIDES, IS_FIXED, BLOCK_N
        )
        item += side
        request, units, cached = of_request[0], of_request[2], of_request[4]
        acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
        # Rows after the last have weights of 0, since no logit comes near their `top`.
        is_real = item * ROWS + at < NUM_ROWS
        top = gl.where(is_real, -float("inf"), LARGE)
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
            left, right = k_left.index(stage), k_right.index(stage)
            mbarrier.wait(left_full.index(stage), phase)
            fence_async_shared()
            logits = gl.zeros([ROWS, BLOCK_N], gl.float32, logits_layout)
            logits = warpgroup_mma(
                q_rope, k_rope.index(stage).permute([1, 0]), logits, use_acc=False, is_async=True
            )
            logits = warpgroup_mma(q_halves.index(0), left.permute([1, 0]), logits, is_async=True)
            mbarrier.wait(right_full.index(stage), phase)
            fence_async_shared()
            logits = warpgroup_mma(q_halves.index(1), right.permute([1, 0]), logits, is_async=True)
            logits = warpgroup_mma_wait(0, deps=[logits])
            if turn == turns - 1:
                mbarrier.arrive(q_free)
            weights, kept_share, top, mass = weigh(
                logits, top, mass, start + turn * BLOCK_N, end, least_end, scale
            )
            weights = weights.to(q_rope.dtype)
            mbarrier.wait(handed_free, turns_handed % 2 ^ 1)
            handed.store(weights)
            handed_rows.store(kept_share)
            fence_async_shared()
            mbarrier.arrive(handed_full)
            turns_handed += 1
            acc = acc * gl.convert_layout(kept_share, acc_rows)[:, None]
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2))
            acc = warpgroup_mma(operand, left, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(left_free.index(stage))
            done += 1
        mbarrier.wait(handed_free, turns_handed % 2 ^ 1)
        handed_rows.store(mass)
        mbarrier.arrive(handed_full)
        turns_handed += 1
        top = gl.convert_layout(top * scale, acc_rows)
        mass = gl.convert_layout(mass, acc_rows)
        store_half(
            acc, top, mass, results, unit, request, item, item_begin, begin, count == units,
            0, GROUP, QUERIES, IS_FIXED, PART_ROWS,
        )  # fmt: skip
        unit += count
        of_request = next_request(unit, last, of_request, plan, ITEMS // SIDES, QUERIES, LENS_SHIFT)


@gluon.jit
def follow(
    results, plan, k_right, handed, handed_rows, right_turns, handed_turns,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr, IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the right half of every item's result."""
    right_full, right_free = right_turns
    handed_full, handed_free = handed_turns
    ITEMS: gl.constexpr = (QUERIES * GROUP + ROWS - 1) // ROWS
    SIDES: gl.constexpr = sides(ITEMS, IS_FIXED)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    program, side = gl.program_id(0) // SIDES, gl.program_id(0) % SIDES
    unit, last, of_request = first_unit(plan, program)
    begin = unit
    done = 0
    turns_handed = 0
    while unit < last:
        item, item_begin, count, _start, turns = place_unit(
            unit, last, of_request, ITEMS // SIDES, IS_FIXED, BLOCK_N
        )
        item += side
        request, units = of_request[0], of_request[2]
        acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
        for _turn in range(turns):
            stage = done % STAGES
            mbarrier.wait(right_full.index(stage), done // STAGES % 2)
            mbarrier.wait(handed_full, turns_handed % 2)
            fence_async_shared()
            acc = acc * handed_rows.load(acc_rows)[:, None]
            acc = warpgroup_mma(handed, k_right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(handed_free)
            mbarrier.arrive(right_free.index(stage))
            turns_handed += 1
            done += 1
        mbarrier.wait(handed_full, turns_handed % 2)
        mass = handed_rows.load(acc_rows)
        mbarrier.arrive(handed_free)
        turns_handed += 1
        store_half(
            acc, mass, mass, results, unit, request, item, item_begin, begin, count == units,
            1, GROUP, QUERIES, IS_FIXED, PART_ROWS,
        )  # fmt: skip
        unit += count
        of_request = next_request(unit, last, of_request, plan, ITEMS // SIDES, QUERIES, LENS_SHIFT)


@gluon.jit
def turns_of(PLACES: gl.constexpr, ARRIVALS: gl.constexpr):
    """The barriers of places in shared memory: full after ARRIVALS arrivals, free after one."""
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), ARRIVALS)
        mbarrier.init(free.index(place), 1)
    return full, free


@gluon.jit(do_not_specialize_on_alignment=["rows", "lens"])
def attend_latent(
    q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride, k, k_stride,
    out, out_stride, lse, lse_stride, slots, slots_stride,
    rows, lens, stops, unit_blocks, starts, share, partial, partial_lse, scale, v_scale,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr, IS_FIXED: gl.constexpr,
    PART_ROWS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid and arguments as of `attend_shares`, planned with blocks of 64 keys. num_warps=4.

    Unless IS_FIXED, the plan is of one item a request, and each of its programs is as many here as
    a request has items, one after the other in the grid.

    q [T, GROUP, 512], q_tail [T, GROUP, 64], k [slots, 576], whose first 512 columns are the
    values, and out [T, GROUP, 512]: of one 16-bit dtype, rows at multiples of 16 bytes.
    slots: page size 1. partial [places, PART_ROWS, 512] float32. lse, rows, lens, stops,
    unit_blocks, starts, share and partial_lse: as there. scale: times log2(e), above 0.
    `merge_latent` merges the partial results.
    """
    gdc_launch_dependents()
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
    handed_rows = gl.allocate_shared_memory(gl.float32, [ROWS], plain)
    copies: gl.constexpr = COPY_WARPS * 32
    q_full, q_free = turns_of(1, copies)
    handed_full, handed_free = turns_of(1, 1)
    left_turns = turns_of(STAGES, copies)
    right_turns = turns_of(STAGES, copies)
    q_turns = (q_full.index(0), q_free.index(0))
    handed_turns = (handed_full.index(0), handed_free.index(0))
    queries = (q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride)
    keys = (k, k_stride, slots, slots_stride)
    plan = (stops, unit_blocks, starts, share, lens, rows)
    results = (out, out_stride, lse, lse_stride, partial, partial_lse, v_scale)
    q_room = (q_halves, q_rope)
    k_room = (k_left, k_right, k_rope)
    gl.warp_specialize(
        [
            (lead, (
                results, scale, plan, q_room, k_room, handed, handed_rows,
                q_turns, left_turns, right_turns, handed_turns,
                GROUP, QUERIES, LENS_SHIFT, IS_FIXED, PART_ROWS, STAGES,
            )),
            (follow, (
                results, plan, k_right, handed, handed_rows, right_turns, handed_turns,
                GROUP, QUERIES, LENS_SHIFT, IS_FIXED, PART_ROWS, STAGES,
            )),
            (produce, (
                queries, keys, plan, q_room, k_room, q_turns, left_turns, right_turns,
                GROUP, QUERIES, LENS_SHIFT, IS_FIXED, STAGES,
            )),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
