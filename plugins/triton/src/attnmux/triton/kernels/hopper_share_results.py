"""The results of `hopper_shares`: stored, left as a partial result, or merged from those."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmux.triton.kernels.hopper_walk import place_rows

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store_rows(results, sinks, acc, top, mass, v_scale, request, item, kind):
    """`blocks.store_rows` for the first M rows of an item's tile. acc [M, DV], top and mass [M]."""
    out, out_stride, lse, lse_stride = results
    layout: gl.constexpr = acc.type.layout
    M: gl.constexpr = acc.shape[0]
    row = item % kind.TILES * kind.BLOCK_M + gl.arange(0, M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, kind.DV, gl.SliceLayout(0, layout))
    is_real = row < kind.ROWS
    token, head = place_rows(gl.minimum(row, kind.ROWS - 1), request, item // kind.TILES, kind)
    if sinks is not None:
        sink = gl.load(sinks + head) * LOG2_E
        higher = gl.maximum(top, sink)
        # Neither keys nor a sink: inf - inf is NaN.
        base = gl.where(higher == -float("inf"), 0.0, higher)
        kept_share = gl.exp2(top - base)
        mass = mass * kept_share + gl.exp2(sink - base)
        acc = acc * kept_share[:, None]
        top = higher
    has_keys = mass > 0
    mass = gl.where(has_keys, mass, 1.0)
    acc = acc * (v_scale / mass)[:, None]
    places = out + (token * out_stride + head * kind.REAL_DV)[:, None] + columns[None, :]
    is_stored = is_real[:, None]
    if kind.REAL_DV < kind.DV:
        is_stored = is_stored & (columns < kind.REAL_DV)[None, :]
    gl.store(places, acc.to(out.dtype.element_ty), mask=is_stored)
    if lse is not None:
        value = gl.where(has_keys, (top + gl.log2(mass)) * LN_2, -float("inf"))
        gl.store(lse + token * lse_stride + head, value, mask=is_real)


@gluon.jit
def leave_part(parts, place, acc, top, mass, PART_ROWS: gl.constexpr):
    """Store a partial result. acc [M, D], top and mass [M]; the first PART_ROWS rows are kept."""
    partial, partial_lse, _arrivals = parts
    layout: gl.constexpr = acc.type.layout
    M: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    row = gl.arange(0, M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    keeps = row < PART_ROWS
    safe = gl.where(mass > 0, mass, 1.0)
    lse = gl.where(mass > 0, top + gl.log2(safe), -float("inf"))
    row = place.to(gl.int64) * PART_ROWS + row
    gl.store(partial_lse + row, lse, mask=keeps)
    gl.store(
        partial + row[:, None] * D + columns[None, :],
        (acc / safe[:, None]).to(partial.dtype.element_ty),
        mask=keeps[:, None],
    )


@gluon.jit
def merge_parts(
    parts,
    first_part,
    num_parts,
    item_begin,
    taken,
    kind,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """As `shares.merge_parts`: acc [ROWS, DV], top and mass [ROWS]."""
    D: gl.constexpr = kind.DV
    partial, partial_lse, _arrivals = parts
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, max(128 // D, 1), min(D // 4, 32)], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    by_part: gl.constexpr = gl.SliceLayout(2, layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, by_part))
    of_part = gl.arange(0, PARTS, gl.SliceLayout(1, by_part))
    columns = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(0, by_part))
    mass = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, by_part))
    acc = gl.zeros([ROWS, D], gl.float32, by_row)
    for done in range(0, num_parts, PARTS):
        part = first_part + done + of_part
        is_part = part < first_part + num_parts
        # The item is the first of its program, or the last.
        place = part if kind.IS_FIXED else 2 * part + (item_begin > part * taken).to(gl.int32)
        row = place.to(gl.int64)[:, None] * ROWS + rows[None, :]
        # Other programs wrote these: this SM's own cache may be stale.
        lse = gl.load(
            partial_lse + row, mask=is_part[:, None], other=-float("inf"), cache_modifier=".cg"
        )
        values = gl.load(
            partial + row[:, :, None] * D + columns[None, None, :],
            mask=is_part[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = gl.maximum(top, gl.max(lse, 0))
        base = gl.where(higher == -float("inf"), 0.0, higher)
        weights = gl.exp2(lse - base[None, :])
        kept_share = gl.exp2(top - base)
        mass = mass * kept_share + gl.sum(weights, 0)
        kept = gl.convert_layout(kept_share, gl.SliceLayout(1, by_row))
        acc = acc * kept[:, None] + gl.sum(values * weights[:, :, None], 0)
        top = higher
    top = gl.convert_layout(top, gl.SliceLayout(1, by_row))
    return acc, top, gl.convert_layout(mass, gl.SliceLayout(1, by_row))


@gluon.jit
def arrive(counter, item_begin, units, taken, kind):
    """Count a part of the item that begins with unit item_begin. Returns whether it was the last
    one, the item's first part, and its number of parts."""
    first_part = item_begin
    num_parts = units
    if not kind.IS_FIXED:
        first_part = item_begin // taken
        num_parts = (item_begin + units - 1) // taken - first_part + 1
    # All threads have written their rows before the program counts as arrived.
    gl.thread_barrier()
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    return arrived == num_parts - 1, first_part, num_parts
