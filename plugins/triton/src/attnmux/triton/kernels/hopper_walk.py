"""A program's way along the line of blocks of keys that `plan_shares` cuts into shares, in Gluon:
every group of warps of a program goes it by itself.

of_request: the request, the units of those before it and its own, blocks of a unit, tokens before
the new ones, keys, and the row of the table of slots.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmux.triton.kernels import shares

STATE = gl.constexpr(shares.STATE.value)


@gluon.jit
def first_unit(plan):
    """Where a program begins and ends, and the request it begins with: see `plan_shares`."""
    _stops, _unit_blocks, starts, share, _lens, _rows = plan
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
    return begin, last, (request, before, units, blocks_each, cached, num_keys, row)


@gluon.jit
def place_unit(
    unit,
    last,
    of_request,
    ITEMS: gl.constexpr,
    IS_FIXED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    low=0,
):
    """The item that a unit is of, where the item begins, how many of its units to take now, their
    first key, and how many blocks of keys they are. low: where the request's first block begins."""
    _request, before, units, blocks_each, _cached, num_keys, _row = of_request
    item = (unit - before * ITEMS) // units
    item_begin = before * ITEMS + item * units
    done = unit - item_begin
    count = gl.minimum(units - done, last - unit)
    if IS_FIXED:
        count = gl.minimum(count, 1)
    start = low + done * blocks_each * BLOCK_N
    stop = gl.minimum(start + count * blocks_each * BLOCK_N, num_keys)
    turns = gl.maximum(stop - start + BLOCK_N - 1, 0) // BLOCK_N
    return item, item_begin, count, start, turns


@gluon.jit
def next_request(
    unit,
    last,
    of_request,
    plan,
    ITEMS: gl.constexpr,
    QUERIES: gl.constexpr,
    LENS_SHIFT: gl.constexpr,
    encoder_lens=None,
    IS_CROSS: gl.constexpr = False,
):
    """The request that a unit is of, which follows the last unit of `of_request` or is its own."""
    stops, unit_blocks, _starts, _share, lens, rows = plan
    request, before, units, blocks_each, cached, num_keys, row = of_request
    if unit == (before + units) * ITEMS:
        request += 1
        if unit < last:
            before += units
            units = gl.load(stops + request + 1) - before
            blocks_each = gl.load(unit_blocks + request)
            cached = gl.load(lens + request) + LENS_SHIFT
            num_keys = cached + QUERIES
            if IS_CROSS:
                num_keys = gl.load(encoder_lens + request)
            row = request
            if rows is not None:
                row = gl.load(rows + request).to(gl.int32)
    return request, before, units, blocks_each, cached, num_keys, row
