"""Attention of few tokens a request over many keys: the keys of all requests in equal shares.

The work is a line of blocks of keys: all requests one after another, in each request its items,
which are tiles of rows times KV heads, and in each item its blocks. Every program takes the same
length of this line, wherever that begins and ends, so that the device is busy to the end whatever
the requests' lengths are. A program that takes a part of an item leaves a partial result; the last
of the item's programs to finish merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.blocks import (
    Keys,
    Queries,
    Sight,
    Widths,
    as_halves,
    attend_blocks,
    biases_of,
    nothing_seen,
    slopes_of,
    store_rows,
    take,
    tile_of_queries,
    visible_range,
)

STATE = tl.constexpr(8)
"""int32 values of a program's row in `starts`, see `plan_shares`."""
TRIES = tl.constexpr(32)
"""Lengths of a share that are tried."""
WHOLE_KEYS = tl.constexpr(256)
"""Items of at most so many keys are not shared if each can have a program: with two in some
programs, 33 requests with a window of 127 took 12.2 us on an H200, and 8.3 with one."""


@triton.jit(
    do_not_specialize=["batch_size"],
    do_not_specialize_on_alignment=["lens", "encoder_lens", "rows"],
)
def plan_shares(
    lens, encoder_lens, rows, stops, unit_blocks, starts, share, batch_size, num_programs,
    least_share, items, split_blocks, max_splits,
    LENS_SHIFT: tl.constexpr, QUERIES: tl.constexpr, IS_CROSS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, IS_FIXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    PROGRAMS: tl.constexpr, MEETS_ENDS: tl.constexpr = False,
):  # fmt: skip
    """Find where each program begins, and how many units it takes.

    A unit is a block of keys or, IS_FIXED, a split: split_blocks blocks, more if a request would
    have more than max_splits.

    lens, encoder_lens [B] int32, rows [B] int64: as in `attend_shares`.
    stops [B + 1] int32: the units of all requests before each, counting one item of a request.
    unit_blocks [B] int32: blocks of a unit.
    share [1] int32: units of a program, at least least_share if requests have so many.
    starts [num_programs, STATE] int32: everything that a program needs to begin, so that it waits
    for memory once. In this order: its first request, the units of the requests before that, the
    request's own units, blocks of a unit, tokens before the new ones, keys, its row in the table of
    slots; and one past the program's last unit.

    items: of a request. BLOCK_B: a power of 2, at least B. Grid: blocks of PROGRAMS programs.
    MEETS_ENDS: shares may be longer to end where items end, for kernels whose partial results are
    expensive. If all requests are equally long, by a sixteenth. Else by a quarter and 8 units,
    if then each program has a part of one item alone: the units of an item are a multiple of a
    share, and those after its last block are empty.
    """
    request = tl.arange(0, BLOCK_B)
    is_request = request < batch_size
    cached = tl.load(lens + request, mask=is_request, other=0) + LENS_SHIFT
    if IS_CROSS:
        num_keys = tl.load(encoder_lens + request, mask=is_request, other=0)
    else:
        num_keys = cached + QUERIES
    first, _ = visible_range(cached, num_keys, not IS_CROSS, WINDOW, CHUNK)
    blocks = (num_keys + BLOCK_N - 1) // BLOCK_N - tl.maximum(first, 0) // BLOCK_N
    # A request without keys has one block in which no key is seen: it writes the empty result.
    blocks = tl.maximum(blocks, 1)
    each = request * 0 + 1
    if IS_FIXED:
        each = tl.maximum(split_blocks, (blocks + max_splits - 1) // max_splits)
    units = tl.where(is_request, (blocks + each - 1) // each, 0)
    stop = tl.cumsum(units, 0)
    total = tl.sum(units, 0) * items
    longest = tl.maximum(tl.max(units, 0), 1)
    taken = tl.maximum((total + num_programs - 1) // num_programs, least_share)
    if not IS_FIXED and not MEETS_ENDS:
        is_short = longest <= tl.maximum(least_share, WHOLE_KEYS // BLOCK_N)
        if is_short & (batch_size * items <= num_programs):
            # Each program has a whole item. Units after its last block are empty.
            taken = longest
            units = tl.where(is_request, longest, 0)
            stop = tl.cumsum(units, 0)
            total = tl.sum(units, 0) * items
    if MEETS_ENDS:
        shortest = tl.min(tl.where(is_request, units, longest), 0)
        whole = (taken + longest - 1) // longest * longest
        is_near = (shortest == longest) & (whole - taken <= taken // 16)
        if is_near:
            taken = whole
        elif batch_size * items <= num_programs:
            longer = taken + tl.arange(0, TRIES) * (taken // 4 + 8) // (TRIES - 1)
            parts = tl.sum((units[:, None] + longer[None, :] - 1) // longer[None, :], 0)
            none = longest + 2 * num_programs
            fitting = tl.min(tl.where(parts * items <= num_programs, longer, none), 0)
            if fitting < none:
                each_parts = tl.maximum((units + fitting - 1) // fitting, 1)
                taken = tl.max((units + each_parts - 1) // each_parts, 0)
                units = tl.where(is_request, each_parts * taken, 0)
        stop = tl.cumsum(units, 0)
        total = tl.sum(units, 0) * items
    row = request
    if rows is not None:
        row = tl.load(rows + request, mask=is_request, other=0).to(tl.int32)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    is_program = program < num_programs
    begin = program * taken
    owner = tl.sum(((stop * items)[None, :] <= begin[:, None]).to(tl.int32), 1)
    start = starts + program * STATE
    tl.store(start, owner, mask=is_program)
    tl.store(start + 1, take(stop - units, request, owner), mask=is_program)
    tl.store(start + 2, take(units, request, owner), mask=is_program)
    tl.store(start + 3, take(each, request, owner), mask=is_program)
    tl.store(start + 4, take(cached, request, owner), mask=is_program)
    tl.store(start + 5, take(num_keys, request, owner), mask=is_program)
    tl.store(start + 6, take(row, request, owner), mask=is_program)
    tl.store(start + 7, tl.minimum(begin + taken, total), mask=is_program)
    if tl.program_id(0) == 0:
        tl.store(stops + 1 + request, stop, mask=is_request)
        tl.store(stops, 0)
        tl.store(unit_blocks + request, each, mask=is_request)
        tl.store(share, taken)


@triton.jit
def merge_parts(
    partial, partial_lse, first_part, num_parts, begin, share,
    DV: tl.constexpr, ROWS: tl.constexpr, IS_FIXED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The softmax over the parts of an item: acc [ROWS, DV], top and mass [ROWS], as after all its
    keys in `attend_blocks`. partial and partial_lse: as in `attend_shares`."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, DV)
    acc, top, mass = nothing_seen(ROWS, DV)
    for done in range(0, num_parts, PARTS):
        part = first_part + done + tl.arange(0, PARTS)
        is_part = part < first_part + num_parts
        # The item is the first of its program, or the last.
        place = part if IS_FIXED else 2 * part + (begin > part * share).to(tl.int32)
        row = place.to(tl.int64)[:, None] * ROWS + rows[None, :]
        # Other programs wrote these: this SM's own cache may be stale.
        lse = tl.load(
            partial_lse + row, mask=is_part[:, None], other=-float("inf"), cache_modifier=".cg"
        )
        values = tl.load(
            partial + row[:, :, None] * DV + columns[None, None, :],
            mask=is_part[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(lse - base[None, :])
        kept_share = tl.exp2(top - base)
        mass = mass * kept_share + tl.sum(weights, 0)
        acc = acc * kept_share[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = higher
    return acc, top, mass


@triton.jit(
    do_not_specialize_on_alignment=[
        "rows",
        "lens",
        "encoder_lens",
        "mask",
        "mask_indptr",
        "first_keys",
    ]
)
def attend_shares(
    q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride,
    k, k_stride, k_head_stride, k_tail, k_tail_stride, k_tail_head_stride,
    v, v_stride, v_head_stride, k_scales, k_scales_stride, k_scales_head_stride,
    v_scales, v_scales_stride, v_scales_head_stride, out, out_stride, lse, lse_stride, sinks,
    alibi_slopes, relative_bias, slots, slots_stride,
    rows, lens, encoder_lens, mask, mask_indptr, first_keys, stops, unit_blocks, starts, share,
    partial, partial_lse, arrivals, scale, cap, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, LENS_SHIFT: tl.constexpr,
    D: tl.constexpr, REAL_D: tl.constexpr, TAIL: tl.constexpr, REAL_TAIL: tl.constexpr,
    DV: tl.constexpr, REAL_DV: tl.constexpr, PAGE: tl.constexpr, IS_LATENT: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_CROSS: tl.constexpr, HAS_ENCODER: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_MASK: tl.constexpr,
    IS_TREE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    IS_FIXED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PART_ROWS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    HAS_ALIBI: tl.constexpr, REACH: tl.constexpr, FOUR_BITS: tl.constexpr,
):  # fmt: skip
    """Attend from QUERIES new tokens a request to the pool's keys. T = B * QUERIES.

    q, q_tail, k, k_tail, v, out, lse, sinks, alibi_slopes, relative_bias, slots, rows, mask,
    mask_indptr and the numbers: as in `attend_tiles`. IS_TREE, next to HAS_MASK: mask
    [B, QUERIES, QUERIES] has the drafts that each draft sees, and first_keys [T] int32 the first
    key of the prefix that it sees.
    lens [B] int32: lens + LENS_SHIFT tokens precede the new ones. encoder_lens [B] int32.
    stops, unit_blocks, starts, share: as `plan_shares` writes them.
    partial [places, PART_ROWS, DV] float32 or Q's dtype, partial_lse [places, PART_ROWS] float32 in
    units of log 2: partial results. Program p has places 2p and 2p + 1, for its first item and its
    last; IS_FIXED each unit has its own.
    arrivals [B * ITEMS] int32: parts of each item that are done; 0 before and after.

    Grid: num_programs of `plan_shares`.
    """
    TILES: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    ITEMS: tl.constexpr = TILES * KV_HEADS
    # One token sees all keys: only the last block is compared with their number. Worth a second
    # loop where a key costs more instructions than its bytes cost time.
    SEES_WHOLE_BLOCKS: tl.constexpr = (
        FOUR_BITS > 0 and QUERIES == 1 and WINDOW < 0 and CHUNK <= 0 and not HAS_MASK
        and not IS_TREE
    )  # fmt: skip
    program = tl.program_id(0)
    taken = tl.load(share)
    start_of = starts + program * STATE
    request = tl.load(start_of)
    before = tl.load(start_of + 1)
    units = tl.load(start_of + 2)
    blocks_each = tl.load(start_of + 3)
    cached = tl.load(start_of + 4)
    num_keys = tl.load(start_of + 5)
    row = tl.load(start_of + 6)
    last = tl.load(start_of + 7)
    begin = program * taken
    unit = begin
    while unit < last:
        item = (unit - before * ITEMS) // units
        item_begin = before * ITEMS + item * units
        done = unit - item_begin
        count = tl.minimum(units - done, last - unit)
        if IS_FIXED:
            count = 1
        kv_head = item // TILES
        tile = item % TILES

        keys_base = slots + row.to(tl.int64) * slots_stride
        if HAS_ENCODER:
            keys_base += tl.load(encoder_lens + request)

        is_real, order, token, head, q_tile, tail_tile = tile_of_queries(
            Queries(q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride),
            tile * BLOCK_M, QUERIES, request * QUERIES, kv_head, GROUP,
            Widths(D, REAL_D, TAIL, REAL_TAIL, DV, REAL_DV), BLOCK_M, FOUR_BITS,
        )  # fmt: skip
        q_scale = scale
        if k.dtype.element_ty.primitive_bitwidth != 16 and q.dtype.element_ty == tl.bfloat16:
            q_tile, tail_tile, factor = as_halves(q_tile, tail_tile, TAIL > 0)
            q_scale = (scale * factor)[:, None]
        position = cached + order
        first, end = visible_range(position, num_keys, IS_CAUSAL, WINDOW, CHUNK)
        mask_rows = mask
        mask_start = 0
        if IS_TREE:
            first = tl.load(first_keys + token)
            end = position * 0 + num_keys
            mask_rows = mask + token.to(tl.int64) * QUERIES - cached
            mask_start = cached
        elif HAS_MASK:
            mask_rows = mask + tl.load(mask_indptr + request) + order.to(tl.int64) * num_keys

        slope = slopes_of(alibi_slopes, head, HAS_ALIBI)
        AHEAD: tl.constexpr = 0 if IS_CAUSAL else REACH
        biases = biases_of(relative_bias, head, position, REACH, AHEAD)
        # All tiles of a request begin where the first token's keys do.
        low, _ = visible_range(cached, num_keys, IS_CAUSAL, WINDOW, CHUNK)
        low = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
        start = low + done * blocks_each * BLOCK_N
        stop = tl.minimum(start + count * blocks_each * BLOCK_N, num_keys)
        k_tail_base = k_tail
        if TAIL > 0:
            k_tail_base = k_tail + kv_head.to(tl.int64) * k_tail_head_stride
        k_scales_base = k_scales
        v_scales_base = v_scales
        if FOUR_BITS:
            k_scales_base = k_scales + kv_head.to(tl.int64) * k_scales_head_stride
            v_scales_base = v_scales + kv_head.to(tl.int64) * v_scales_head_stride
        all_keys = Keys(
            k + kv_head.to(tl.int64) * k_head_stride, k_stride, k_tail_base, k_tail_stride,
            v + kv_head.to(tl.int64) * v_head_stride, v_stride, k_scales_base, k_scales_stride,
            v_scales_base, v_scales_stride, keys_base,
        )  # fmt: skip
        sight = Sight(
            first, end, mask_rows, mask_start, position, position, position, slope, biases
        )
        acc, top, mass = nothing_seen(BLOCK_M, DV)
        if SEES_WHOLE_BLOCKS:
            whole = tl.maximum(tl.minimum(stop, num_keys // BLOCK_N * BLOCK_N), start)
            acc, top, mass = attend_blocks(
                acc, top, mass, q_tile, tail_tile, all_keys, start, whole, num_keys, sight,
                q_scale, cap, Widths(D, REAL_D, TAIL, REAL_TAIL, DV, REAL_DV), BLOCK_N, PAGE,
                IS_LATENT, False,
                HAS_CAP, False, False, False, HAS_ALIBI, REACH, AHEAD, STAGES,
                FOUR_BITS,
            )  # fmt: skip
            start = whole
        acc, top, mass = attend_blocks(
            acc, top, mass, q_tile, tail_tile, all_keys, start, stop, num_keys, sight,
            q_scale, cap, Widths(D, REAL_D, TAIL, REAL_TAIL, DV, REAL_DV), BLOCK_N, PAGE,
            IS_LATENT, False,
            HAS_CAP, HAS_MASK, False, True, HAS_ALIBI, REACH, AHEAD,
            1 if SEES_WHOLE_BLOCKS else STAGES, FOUR_BITS,
        )  # fmt: skip
        if count == units:
            store_rows(
                out, out_stride, lse, lse_stride, sinks, acc, top, mass, token, head, is_real,
                v_scale, DV, REAL_DV, HAS_SINKS, HAS_LSE, FOUR_BITS,
            )  # fmt: skip
        else:
            place = unit if IS_FIXED else 2 * program + (item_begin > begin).to(tl.int32)
            part_rows = place.to(tl.int64) * PART_ROWS + tl.arange(0, BLOCK_M)
            columns = tl.arange(0, DV)
            keeps = tl.arange(0, BLOCK_M) < PART_ROWS
            safe = tl.where(mass > 0, mass, 1.0)
            part_lse = tl.where(mass > 0, top + tl.log2(safe), -float("inf"))
            tl.store(partial_lse + part_rows, part_lse, mask=keeps)
            tl.store(
                partial + part_rows[:, None] * DV + columns[None, :],
                (acc / safe[:, None]).to(partial.dtype.element_ty),
                mask=keeps[:, None],
            )
            if IS_FIXED:
                first_part = item_begin
                num_parts = units
            else:
                first_part = item_begin // taken
                num_parts = (item_begin + units - 1) // taken - first_part + 1
            # All threads have written their rows before the program counts as arrived.
            tl.debug_barrier()
            counter = arrivals + request * ITEMS + item
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == num_parts - 1:
                tl.store(counter, 0)
                merged, merged_top, merged_mass = merge_parts(
                    partial, partial_lse, first_part, num_parts, item_begin, taken, DV, PART_ROWS,
                    IS_FIXED, PARTS,
                )  # fmt: skip
                merged_rows = tile * BLOCK_M + tl.arange(0, PART_ROWS)
                is_merged = merged_rows < QUERIES * GROUP
                merged_rows = tl.minimum(merged_rows, QUERIES * GROUP - 1)
                store_rows(
                    out, out_stride, lse, lse_stride, sinks, merged, merged_top, merged_mass,
                    request * QUERIES + merged_rows // GROUP,
                    kv_head * GROUP + merged_rows % GROUP,
                    is_merged, v_scale, DV, REAL_DV, HAS_SINKS, HAS_LSE, FOUR_BITS,
                )  # fmt: skip
        unit += count
        if unit == (before + units) * ITEMS:
            request += 1
            if unit < last:
                before += units
                units = tl.load(stops + request + 1) - before
                blocks_each = tl.load(unit_blocks + request)
                cached = tl.load(lens + request) + LENS_SHIFT
                num_keys = cached + QUERIES
                if IS_CROSS:
                    num_keys = tl.load(encoder_lens + request)
                row = request
                if rows is not None:
                    row = tl.load(rows + request).to(tl.int32)
