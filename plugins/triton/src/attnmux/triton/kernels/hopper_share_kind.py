"""What `hopper_shares` is compiled for, and which rows and keys a unit of its work has."""

# No annotations as strings: an aggregate looks at those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from attnmux.triton.kernels import blocks
from attnmux.triton.kernels.hopper_walk import next_request, place_unit

visible_range = gluon.jit(blocks.visible_range.fn)


@aggregate
class ShareKind:
    """By the names of the kernel's arguments."""

    KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    QUERIES: gl.constexpr
    LENS_SHIFT: gl.constexpr
    D: gl.constexpr
    PAGE: gl.constexpr
    IS_CAUSAL: gl.constexpr
    IS_CROSS: gl.constexpr
    HAS_ENCODER: gl.constexpr
    WINDOW: gl.constexpr
    CHUNK: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_MASK: gl.constexpr
    IS_FIXED: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    ROWS: gl.constexpr
    """Of a request and KV head: query heads times new tokens."""
    TILES: gl.constexpr
    """Of BLOCK_M rows, the last perhaps part empty."""
    ITEMS: gl.constexpr
    """Tiles of a request."""

    @gluon.constexpr_function
    def __init__(
        self,
        KV_HEADS,
        GROUP,
        QUERIES,
        LENS_SHIFT,
        D,
        PAGE,
        IS_CAUSAL,
        IS_CROSS,
        HAS_ENCODER,
        WINDOW,
        CHUNK,
        HAS_CAP,
        HAS_MASK,
        IS_FIXED,
        BLOCK_M,
        BLOCK_N,
    ):
        self.KV_HEADS = gl.constexpr(KV_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.QUERIES = gl.constexpr(QUERIES)
        self.LENS_SHIFT = gl.constexpr(LENS_SHIFT)
        self.D = gl.constexpr(D)
        self.PAGE = gl.constexpr(PAGE)
        self.IS_CAUSAL = gl.constexpr(IS_CAUSAL)
        self.IS_CROSS = gl.constexpr(IS_CROSS)
        self.HAS_ENCODER = gl.constexpr(HAS_ENCODER)
        self.WINDOW = gl.constexpr(WINDOW)
        self.CHUNK = gl.constexpr(CHUNK)
        self.HAS_CAP = gl.constexpr(HAS_CAP)
        self.HAS_MASK = gl.constexpr(HAS_MASK)
        self.IS_FIXED = gl.constexpr(IS_FIXED)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.ROWS = gl.constexpr(QUERIES * GROUP)
        self.TILES = gl.constexpr((QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M)
        self.ITEMS = gl.constexpr(self.TILES.value * KV_HEADS)


@gluon.jit
def place_share(unit, last, of_request, kind):
    """As `place_unit`."""
    _request, _before, _units, _blocks_each, cached, num_keys, _row = of_request
    low, _ = visible_range(cached, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK)
    low = gl.maximum(low, 0) // kind.BLOCK_N * kind.BLOCK_N
    return place_unit(unit, last, of_request, kind.ITEMS, kind.IS_FIXED, kind.BLOCK_N, low)


@gluon.jit
def after_share(unit, last, of_request, plan, encoder_lens, kind):
    """As `next_request`."""
    return next_request(
        unit,
        last,
        of_request,
        plan,
        kind.ITEMS,
        kind.QUERIES,
        kind.LENS_SHIFT,
        encoder_lens,
        kind.IS_CROSS,
    )


@gluon.jit
def place_rows(row, request, kv_head, kind):
    """Tokens and heads of a request's rows."""
    token = request * kind.QUERIES + row // kind.GROUP
    return token.to(gl.int64), kv_head * kind.GROUP + row % kind.GROUP
