"""`attend_shares` for absorbed MLA on Hopper GPUs, in Gluon.

Every part of a program walks the units of its share; `latent_tile.py` attends from the rows
of one item. Partial results of an item are left to `merge_latent`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from attnmux.triton.kernels.hopper.latent_tile import (
    BLOCK_N,
    COPY_WARPS,
    HALF,
    RANK,
    ROWS,
    LatentTile,
    copy_keys,
    follow,
    lead,
    make_rooms,
    store_whole,
)
from attnmux.triton.kernels.hopper.walk import first_unit, next_request, place_unit


@gluon.constexpr_function
def sides(items, is_fixed):
    """Programs that take the same keys side by side, each for an item of its own, so that they read
    them from L2 at the same time. Fixed splits have their items in the line instead."""
    return 1 if is_fixed else items


@gluon.jit
def tile_of(item, of_request, GROUP: gl.constexpr, QUERIES: gl.constexpr):
    """The rows of an item."""
    return LatentTile(
        GROUP,
        first_row=item * ROWS,
        num_rows=gl.to_tensor(QUERIES * GROUP),
        first_token=of_request[0] * QUERIES,
        cached=of_request[4],
        num_keys=of_request[5],
    )


@gluon.jit
def copy_share(
    queries, keys, table, plan, rooms,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr, IS_FIXED: gl.constexpr,
):  # fmt: skip
    """Copy every item's queries, and the rows of its keys."""
    slots, slots_stride = table
    ITEMS: gl.constexpr = (QUERIES * GROUP + ROWS - 1) // ROWS
    SIDES: gl.constexpr = sides(ITEMS, IS_FIXED)
    program, side = gl.program_id(0) // SIDES, gl.program_id(0) % SIDES
    unit, last, of_request = first_unit(plan, program)
    done = 0
    filled = 0
    while unit < last:
        item, _begin, count, start, turns = place_unit(
            unit, last, of_request, ITEMS // SIDES, IS_FIXED, BLOCK_N
        )
        tile = tile_of(item + side, of_request, GROUP, QUERIES)
        row_of_table = slots + of_request[6].to(gl.int64) * slots_stride
        done, filled = copy_keys(
            keys, row_of_table, 0, start, turns, queries, tile, rooms, done, filled
        )
        unit += count
        of_request = next_request(unit, last, of_request, plan, ITEMS // SIDES, QUERIES, LENS_SHIFT)


@gluon.jit
def store_item(
    acc, top, mass, results, parts, tile, unit, item_begin, begin, is_whole,
    PART: gl.constexpr, IS_FIXED: gl.constexpr, PART_ROWS: gl.constexpr,
):  # fmt: skip
    """Store half of an item's columns, as a partial result unless the program has all of its keys.

    acc [ROWS, HALF], top and mass [ROWS]: as of `lead`.
    """
    if is_whole:
        store_whole(acc, top, mass, results, tile, PART)
    else:
        partial, partial_lse = parts
        layout: gl.constexpr = acc.type.layout
        columns = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        at = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        has_keys = mass > 0
        safe = gl.where(has_keys, mass, 1.0)
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
def attend_share(
    results, parts, scale, plan, rooms,
    PART: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr,
    IS_FIXED: gl.constexpr, PART_ROWS: gl.constexpr,
):  # fmt: skip
    """Compute and store the left or, with PART 1, the right half of every item's result."""
    ITEMS: gl.constexpr = (QUERIES * GROUP + ROWS - 1) // ROWS
    SIDES: gl.constexpr = sides(ITEMS, IS_FIXED)
    program, side = gl.program_id(0) // SIDES, gl.program_id(0) % SIDES
    unit, last, of_request = first_unit(plan, program)
    begin = unit
    done = 0
    filled = 0
    passed = 0
    while unit < last:
        item, item_begin, count, start, turns = place_unit(
            unit, last, of_request, ITEMS // SIDES, IS_FIXED, BLOCK_N
        )
        tile = tile_of(item + side, of_request, GROUP, QUERIES)
        if PART == 0:
            acc, top, mass, done, filled, passed = lead(
                start, turns, scale, tile, rooms, done, filled, passed, False
            )
        else:
            acc, mass, done, passed = follow(turns, rooms, done, passed, False)
            top = mass
        is_whole = count == of_request[2]
        store_item(
            acc, top, mass, results, parts, tile, unit, item_begin, begin, is_whole,
            PART, IS_FIXED, PART_ROWS,
        )  # fmt: skip
        unit += count
        of_request = next_request(unit, last, of_request, plan, ITEMS // SIDES, QUERIES, LENS_SHIFT)


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
    rooms = make_rooms(q.dtype.element_ty, STAGES)
    queries = (q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride)
    keys = (k, k_stride, None, None)
    plan = (stops, unit_blocks, starts, share, lens, rows)
    results = (out, out_stride, lse, lse_stride, v_scale)
    parts = (partial, partial_lse)
    gl.warp_specialize(
        [
            (attend_share, (
                results, parts, scale, plan, rooms,
                0, GROUP, QUERIES, LENS_SHIFT, IS_FIXED, PART_ROWS,
            )),
            (attend_share, (
                results, parts, scale, plan, rooms,
                1, GROUP, QUERIES, LENS_SHIFT, IS_FIXED, PART_ROWS,
            )),
            (copy_share, (
                queries, keys, (slots, slots_stride), plan, rooms,
                GROUP, QUERIES, LENS_SHIFT, IS_FIXED,
            )),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
