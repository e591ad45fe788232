"""The rows of a tile of queries: loaded into shared memory, held in registers, and stored."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmux.triton.kernels.hopper.copies import columns_before, copy_layout, whole_rows
from attnmux.triton.kernels.hopper.weights import pack

ROWS = gl.constexpr(64)
"""Rows of a warpgroup, which are those of its matrix instruction."""
LEAST_QUERY = gl.constexpr(2.0**-100)


@gluon.jit
def queries_of(tile, row, GROUP: gl.constexpr):
    """The tokens and heads of rows of a request."""
    return (tile.q_begin + row // GROUP).to(gl.int64), tile.kv_head * GROUP + row % GROUP


@gluon.jit
def places_of_queries(
    q, q_stride, q_head_stride, tile, PART: gl.constexpr, WIDTH: gl.constexpr, kind,
    layout: gl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] addresses of warpgroup PART's rows."""
    row = tile.first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    # Rows after the last are copies of it, so that they need no other keys.
    token, head = queries_of(tile, gl.minimum(row, tile.num_rows - 1), kind.GROUP)
    offsets = token * q_stride + head.to(gl.int64) * q_head_stride
    return whole_rows(q, offsets, WIDTH, layout)


@gluon.jit
def load_queries(
    q, q_stride, q_head_stride, tile, room, PART: gl.constexpr, REAL: gl.constexpr, kind
):
    """Copy columns of warpgroup PART's rows into shared memory, [ROWS, width]. REAL: those that q
    has; the rest is 0."""
    layout: gl.constexpr = copy_layout(16, room.shape[1], gl.num_warps())
    places = places_of_queries(q, q_stride, q_head_stride, tile, PART, room.shape[1], kind, layout)
    if room.shape[1] == REAL:
        room.store(gl.load(places))
    else:
        is_real = columns_before(REAL, room.shape[1], layout)
        room.store(gl.load(places, mask=is_real, other=0.0))


@gluon.jit
def round_queries(q, q_stride, q_head_stride, tile, room, PART: gl.constexpr, kind):
    """Like `load_queries`, with each row rounded to the 8 bits of `room` [ROWS, D] after it is
    divided by a power of 2. Returns the divisors [ROWS].

    The power brings a row's largest value between 128 and 256, e4m3's largest being 448. Values
    that are 2**14 times smaller lose bits beyond those of the rounding.
    """
    layout: gl.constexpr = copy_layout(16, kind.D, gl.num_warps())
    places = places_of_queries(q, q_stride, q_head_stride, tile, PART, kind.D, kind, layout)
    queries = gl.load(places).to(gl.float32)
    # The least keeps the power and its inverse among float32's normal numbers.
    highest = gl.maximum(gl.max(gl.abs(queries), 1), LEAST_QUERY)
    power = gl.floor(gl.log2(highest)) - 7.0
    room.store((queries * gl.exp2(-power)[:, None]).to(room.dtype))
    return gl.exp2(power)


@gluon.jit
def hold_queries(room, logits: gl.constexpr):
    """A warpgroup's queries [ROWS, D] in shared memory, in registers: pairs of 16 bits, see `pack`,
    or the left operand of 8 bits. logits: the layout of the product."""
    if room.dtype.primitive_bitwidth == 8:
        return room.load(gl.DotOperandLayout(0, logits, 4))
    else:
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
