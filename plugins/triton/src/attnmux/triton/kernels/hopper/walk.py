"""A program's way along the line of blocks of keys that `plan_shares` cuts into shares, in Gluon.

Every group of warps of a program walks it by itself. `plan` holds the tensors of a plan: stops,
unit_blocks, starts, share, lens, rows. `of_request` holds a request: its number, the units of the
requests before it, its own units, blocks of a unit, tokens before the new ones, keys, and its row
in the table of slots.
"""

# No annotations as strings: an aggregate reads those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from attnmux.triton.kernels import blocks, shares
from attnmux.triton.kernels.hopper.gluon_names import next_power_of_2

visible_range = gluon.jit(blocks.visible_range.fn)
STATE = gl.constexpr(shares.STATE.value)


@gluon.jit
def first_unit(plan, program):
    """A program's first unit and one past its last, and the request of the first: see
    `plan_shares`."""
    _stops, _unit_blocks, starts, share, _lens, _rows = plan
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
    """The item that a unit belongs to, the item's first unit, how many of its units to take now,
    their first key, and their number of blocks of keys. low: the request's first key, rounded down
    to a block."""
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
    """The request that a unit belongs to: that of `of_request`, or the next one."""
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


@aggregate
class ShareKind:
    """The constants of `shares`. Most have the names of the kernel's arguments."""

    KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    QUERIES: gl.constexpr
    LENS_SHIFT: gl.constexpr
    REAL_D: gl.constexpr
    """Columns of K."""
    REAL_DV: gl.constexpr
    """Columns of V."""
    D: gl.constexpr
    """Columns of a tile of keys: the next power of 2."""
    DV: gl.constexpr
    PAGE: gl.constexpr
    IS_CAUSAL: gl.constexpr
    IS_CROSS: gl.constexpr
    HAS_ENCODER: gl.constexpr
    WINDOW: gl.constexpr
    CHUNK: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_MASK: gl.constexpr
    IS_TREE: gl.constexpr
    IS_FIXED: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    ROWS: gl.constexpr
    """Rows of a request and KV head: query heads times new tokens."""
    TILES: gl.constexpr
    """Tiles of BLOCK_M rows; the last may be partly empty."""
    ITEMS: gl.constexpr
    """Tiles of a request in all KV heads."""

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))
        rows = constants["QUERIES"] * constants["GROUP"]
        tiles = (rows + constants["BLOCK_M"] - 1) // constants["BLOCK_M"]
        self.D = gl.constexpr(next_power_of_2(constants["REAL_D"]))
        self.DV = gl.constexpr(next_power_of_2(constants["REAL_DV"]))
        self.ROWS = gl.constexpr(rows)
        self.TILES = gl.constexpr(tiles)
        self.ITEMS = gl.constexpr(tiles * constants["KV_HEADS"])


@gluon.jit
def place_share(unit, last, of_request, kind):
    """`place_unit` for a layer with a window or chunks."""
    _request, _before, _units, _blocks_each, cached, num_keys, _row = of_request
    low, _ = visible_range(cached, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK)
    low = gl.maximum(low, 0) // kind.BLOCK_N * kind.BLOCK_N
    return place_unit(unit, last, of_request, kind.ITEMS, kind.IS_FIXED, kind.BLOCK_N, low)


@gluon.jit
def after_share(unit, last, of_request, plan, encoder_lens, kind):
    """`next_request` for a layer that may attend over an encoder."""
    return next_request(
        unit, last, of_request, plan, kind.ITEMS, kind.QUERIES, kind.LENS_SHIFT, encoder_lens,
        kind.IS_CROSS,
    )  # fmt: skip


@gluon.jit
def place_rows(row, request, kv_head, kind):
    """Tokens and heads of a request's rows."""
    token = request * kind.QUERIES + row // kind.GROUP
    return token.to(gl.int64), kv_head * kind.GROUP + row % kind.GROUP
