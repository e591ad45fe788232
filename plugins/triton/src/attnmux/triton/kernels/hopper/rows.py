"""The rows of a tile of queries: loaded into shared memory, held in registers, and stored."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmux.triton.kernels.hopper.copies import columns_before, copy_layout, whole_rows
from attnmux.triton.kernels.hopper.weights import pack

ROWS = gl.constexpr(64)
"""Rows of a warpgroup, which are those of its matrix instruction."""


@gluon.jit
def queries_of(tile, row, GROUP: gl.constexpr):
    """The tokens and heads of rows of a request."""
    return (tile.q_begin + row // GROUP).to(gl.int64), tile.kv_head * GROUP + row % GROUP


@gluon.jit
def load_queries(
    q, q_stride, q_head_stride, tile, room, PART: gl.constexpr, REAL: gl.constexpr, kind
):
    """Copy columns of warpgroup PART's rows into shared memory, [ROWS, width]. REAL: those that q
    has; the rest is 0."""
    layout: gl.constexpr = copy_layout(16, room.shape[1], gl.num_warps())
    row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    # Rows after the last are copies of it, so that they need no other keys.
    token, head = queries_of(tile, gl.minimum(row, tile.num_rows - 1), kind.GROUP)
    offsets = token * q_stride + head.to(gl.int64) * q_head_stride
    places = whole_rows(q, offsets, room.shape[1], layout)
    if room.shape[1] == REAL:
        room.store(gl.load(places))
    else:
        is_real = columns_before(REAL, room.shape[1], layout)
        room.store(gl.load(places, mask=is_real, other=0.0))


@gluon.jit
def hold_queries(room):
    """A warpgroup's queries [ROWS, D] in shared memory, as pairs in registers: see `pack`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, room.shape[1], 16])
    return pack(room.load(layout).to(gl.float32), room.dtype)


@gluon.jit
def store_result(out, out_stride, acc, tile, room, PART: gl.constexpr, REAL: gl.constexpr, kind):
    """Store columns of warpgroup PART's rows. room: shared memory that turns them into whole rows.
    REAL: of the columns, those that out has."""
    WIDTH: gl.constexpr = acc.shape[1]
    V_WIDTH: gl.constexpr = kind.D + kind.V_TAIL
    if kind.SPLIT_BLOCKS > 0:
        layout: gl.constexpr = acc.type.layout
        row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        token, head = queries_of(tile, row, kind.GROUP)
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
        places = out + (token * out_stride + head * V_WIDTH)[:, None] + columns
        is_there = (row < tile.num_rows)[:, None]
        if WIDTH > REAL:
            is_there = is_there & (columns < REAL)
        gl.store(places, acc, mask=is_there)
    else:
        wide: gl.constexpr = copy_layout(16, WIDTH, gl.num_warps())
        room.store(acc.to(out.dtype.element_ty))
        row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
        token, head = queries_of(tile, row, kind.GROUP)
        places = whole_rows(out, token * out_stride + head * V_WIDTH, WIDTH, wide)
        is_there = (row < tile.num_rows)[:, None]
        if WIDTH > REAL:
            is_there = is_there & columns_before(REAL, WIDTH, wide)
        gl.store(places, room.load(wide), mask=is_there)
