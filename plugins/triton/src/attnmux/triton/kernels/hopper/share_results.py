"""The results of `shares`: stored, left as a partial result, or merged from those.

Whichever program finishes a part last merges them. It reads a few parts at a time, so that the
parts of many programs take as long as the attention. More than MOST_PARTS are merged in two steps:
first in spans of neighbours, each by the last program of the span, and then the spans.
"""

# No annotations as strings: an aggregate reads those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from attnmux.triton.kernels.hopper.gluon_names import barrier
from attnmux.triton.kernels.hopper.walk import place_rows

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Parts:
    """The partial results of an item, one of each program that has some of its keys."""

    values: gl.tensor
    """[places, PART_ROWS, DV]."""
    lse: gl.tensor
    """[places, PART_ROWS] float32, in units of log 2."""
    arrivals: gl.tensor
    """A counter: the item's parts, or spans, that are there."""
    span_arrivals: gl.tensor
    """[places] int32: the parts of a span that are there, at the place of its first one."""
    first: gl.tensor
    """The item's first part: a program, or a unit if IS_FIXED."""
    count: gl.tensor
    begin: gl.tensor
    """The item's first unit."""
    taken: gl.tensor
    """Units of a program."""
    IS_FIXED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, IS_FIXED, **values):
        for name, value in values.items():
            setattr(self, name, value)
        self.IS_FIXED = gl.constexpr(IS_FIXED)

    @gluon.jit
    def place(self, part):
        """Where parts are stored. A program has at most two, of its first item and of its last."""
        place = part
        if not self.IS_FIXED:
            place = 2 * part + (self.begin > part * self.taken).to(gl.int32)
        return place


@gluon.jit
def parts_of(buffers, item_begin, units, taken, counter, kind):
    """The parts of the item that begins with unit item_begin. buffers: partial, partial_lse,
    arrivals and span_arrivals; counter: the item's, in arrivals."""
    partial, partial_lse, arrivals, span_arrivals = buffers
    first = item_begin
    count = units
    if not kind.IS_FIXED:
        first = item_begin // taken
        count = (item_begin + units - 1) // taken - first + 1
    return Parts(
        kind.IS_FIXED,
        values=partial,
        lse=partial_lse,
        arrivals=arrivals + counter,
        span_arrivals=span_arrivals,
        first=first,
        count=count,
        begin=item_begin,
        taken=taken,
    )


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
def pass_part(
    results, sinks, parts, part, acc, top, mass, v_scale, request, item,
    PART_ROWS: gl.constexpr, PARTS: gl.constexpr, MOST_PARTS: gl.constexpr, kind,
):  # fmt: skip
    """Leave a partial result, and store the item's result if this was its last part.

    acc [M, DV], top and mass [M]: after some of the item's keys, as in `attend_blocks`.
    """
    leave_part(parts, part, acc, top, mass, PART_ROWS)
    span = 1
    is_span = True
    if MOST_PARTS > 0:
        span = span_of(parts, PARTS, MOST_PARTS)
        if span > 1:
            is_span = merge_span(parts, part, span, PART_ROWS, PARTS, kind)
    if is_span:
        spans = (parts.count + span - 1) // span
        if arrive(parts.arrivals, spans):
            whole, whole_top, whole_mass = merge_parts(
                parts, parts.first, spans, span, PART_ROWS, PARTS, kind
            )
            store_rows(results, sinks, whole, whole_top, whole_mass, v_scale, request, item, kind)


@gluon.jit
def leave_part(parts, part, acc, top, mass, PART_ROWS: gl.constexpr):
    """Store a partial result. acc [M, D], top and mass [M]; the first PART_ROWS rows are kept."""
    layout: gl.constexpr = acc.type.layout
    M: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    row = gl.arange(0, M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    keeps = row < PART_ROWS
    safe = gl.where(mass > 0, mass, 1.0)
    lse = gl.where(mass > 0, top + gl.log2(safe), -float("inf"))
    row = parts.place(part).to(gl.int64) * PART_ROWS + row
    gl.store(parts.lse + row, lse, mask=keeps)
    gl.store(
        parts.values + row[:, None] * D + columns[None, :],
        (acc / safe[:, None]).to(parts.values.dtype.element_ty),
        mask=keeps[:, None],
    )


@gluon.jit
def arrive(counter, count):
    """Count one of `count` results as stored. Returns whether it was the last one, and sets the
    counter back then."""
    # All threads have written their rows before the program counts as arrived.
    barrier()
    is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        gl.store(counter, 0)
    return is_last


@gluon.jit
def span_of(parts, PARTS: gl.constexpr, MOST_PARTS: gl.constexpr):
    """Parts of a span: 1 if all parts are merged in one step. It depends on the number of the
    item's parts alone."""
    span = parts.count * 0 + 1
    if parts.count > MOST_PARTS:
        root = gl.sqrt(parts.count.to(gl.float32)).to(gl.int32)
        span = (root // PARTS + 1) * PARTS
    return span


@gluon.jit
def merge_span(parts, part, span, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, kind):
    """Merge the span that a part is in, if the part is the last of it. Returns whether it was."""
    first = parts.first + (part - parts.first) // span * span
    count = gl.minimum(span, parts.first + parts.count - first)
    is_last = arrive(parts.span_arrivals + parts.place(first), count)
    if is_last:
        acc, top, mass = merge_parts(parts, first, count, 1, PART_ROWS, PARTS, kind)
        # All threads have read the part that is overwritten.
        barrier()
        leave_part(parts, first, acc, top, mass, PART_ROWS)
    return is_last


@gluon.jit
def merge_parts(parts, first, count, step, ROWS: gl.constexpr, PARTS: gl.constexpr, kind):
    """The softmax over `count` parts, each the step-th after the one before: acc [ROWS, DV], top
    and mass [ROWS], as after all their keys in `attend_blocks`."""
    D: gl.constexpr = kind.DV
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, max(128 // D, 1), min(D // 4, 32)], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    by_part: gl.constexpr = gl.SliceLayout(2, layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, by_part))
    of_turn = gl.arange(0, PARTS, gl.SliceLayout(1, by_part))
    columns = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(0, by_part))
    mass = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, by_part))
    acc = gl.zeros([ROWS, D], gl.float32, by_row)
    for done in range(0, count, PARTS):
        is_part = done + of_turn < count
        place = parts.place(first + (done + of_turn) * step)
        row = place.to(gl.int64)[:, None] * ROWS + rows[None, :]
        # Other programs wrote these: this SM's own cache may be stale.
        lse = gl.load(
            parts.lse + row, mask=is_part[:, None], other=-float("inf"), cache_modifier=".cg"
        )
        values = gl.load(
            parts.values + row[:, :, None] * D + columns[None, None, :],
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
