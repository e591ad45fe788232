"""A tile of absorbed MLA against its keys on Hopper GPUs, in Gluon, with copies and products in
different warps.

A tile of 64 rows of queries fills the registers: its result is 64 x 512 float32, half of it in each
of two warpgroups. One leads: it computes logits and softmax, and passes the weights to the one that
follows through shared memory; each multiplies them with its half of the values, which are columns
of the keys. Further warps copy the rows of the keys into shared memory, `STAGES` blocks ahead, past
the end of a tile.

If it LAGS, the one that follows begins with a block when the leading one has the logits of the
next block, so that the tensor cores have work during the softmax of those. That holds places in
shared memory longer, which the memory-bound steps of decode need.
"""

# No annotations as strings: an aggregate reads those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from attnmux.triton.kernels.hopper.gluon_names import copy_to_shared
from attnmux.triton.kernels.hopper.rescaling import raised, rescaled

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


@aggregate
class Rooms:
    """Shared memory of a program, and the barriers of its parts."""

    q_halves: gl.shared_memory_descriptor
    """[2, ROWS, HALF]."""
    q_rope: gl.shared_memory_descriptor
    """[ROWS, ROPE]."""
    k_left: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, HALF]."""
    k_right: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, HALF]."""
    k_rope: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, ROPE]."""
    weights: gl.shared_memory_descriptor
    """[ROWS, BLOCK_N]: passed from the leading warpgroup to the following one."""
    factors: gl.shared_memory_descriptor
    """[ROWS] float32: passed with the weights; at the end of a tile, the rows' masses."""
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    """Barriers of `k_left` and `k_rope`."""
    left_free: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    right_free: gl.shared_memory_descriptor
    passed_full: gl.shared_memory_descriptor
    passed_free: gl.shared_memory_descriptor
    multiplied: gl.shared_memory_descriptor
    """One phase for each block whose logits the leading warpgroup has."""
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, STAGES, **rooms):
        for name, room in rooms.items():
            setattr(self, name, room)
        self.STAGES = gl.constexpr(STAGES)


@aggregate
class LatentTile:
    """Up to ROWS rows of a request: query heads of its new tokens, of one KV head."""

    first_row: gl.tensor
    num_rows: gl.tensor
    """Rows of the request."""
    first_token: gl.tensor
    """The request's, among the step's."""
    cached: gl.tensor
    """The position of the request's first new token."""
    num_keys: gl.tensor
    GROUP: gl.constexpr
    """Query heads."""

    @gluon.constexpr_function
    def __init__(self, GROUP, **values):
        for name, value in values.items():
            setattr(self, name, value)
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def place(self, row):
        """The tokens and heads of rows of the request."""
        return self.first_token + row // self.GROUP, row % self.GROUP


@gluon.jit
def make_rooms(dtype: gl.constexpr, STAGES: gl.constexpr):
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    copies: gl.constexpr = COPY_WARPS * 32
    q_full, q_free = turns_of(1, copies)
    passed_full, passed_free = turns_of(1, 1)
    multiplied, _ = turns_of(1, 1)
    left_full, left_free = turns_of(STAGES, copies)
    right_full, right_free = turns_of(STAGES, copies)
    return Rooms(
        STAGES,
        q_halves=gl.allocate_shared_memory(dtype, [2, ROWS, HALF], half),
        q_rope=gl.allocate_shared_memory(dtype, [ROWS, ROPE], narrow),
        k_left=gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half),
        k_right=gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half),
        k_rope=gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], narrow),
        weights=gl.allocate_shared_memory(dtype, [ROWS, BLOCK_N], narrow),
        factors=gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        q_full=q_full.index(0),
        q_free=q_free.index(0),
        left_full=left_full,
        left_free=left_free,
        right_full=right_full,
        right_free=right_free,
        passed_full=passed_full.index(0),
        passed_free=passed_free.index(0),
        multiplied=multiplied.index(0),
    )


@gluon.jit
def turns_of(PLACES: gl.constexpr, ARRIVALS: gl.constexpr):
    """The barriers of places in shared memory: full after ARRIVALS arrivals, free after one."""
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), ARRIVALS)
        mbarrier.init(free.index(place), 1)
    return full, free


@gluon.jit
def copy_columns(base, offsets, is_there, to, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Copy rows of a matrix into shared memory, 16 bytes a thread at a time; 0 where is_there is
    False. is_there: None if all are there."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    places = offsets[:, None] + columns[None, :]
    places = base + gl.max_contiguous(gl.multiple_of(places, [1, 8]), [1, 8])
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])
    if is_there is None:
        copy_to_shared(to, places)
    else:
        copy_to_shared(to, places, mask=is_there[:, None])


@gluon.jit
def weigh(logits, top, mass, first_key, end, least_end, scale):
    """A block's weights [64, 64], the factor [64] of the earlier ones, and the new top and mass.

    top is in the logits' unit, which times scale is that of log 2.
    """
    if first_key + BLOCK_N > least_end:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(keys[None, :] < end[:, None], logits, -float("inf"))
    higher = raised(top, gl.max(logits, 1), scale)
    # A row that has seen no key yet: inf - inf is NaN.
    base = gl.where(higher == -float("inf"), 0.0, higher)
    weights = gl.exp2(logits * scale - (base * scale)[:, None])
    # Exactly 1 where `top` stays, which a fused top * scale - base * scale is not.
    kept_share = gl.exp2((top - base) * scale)
    mass = mass * kept_share + gl.sum(weights, 1)
    return weights, kept_share, higher, mass


@gluon.jit
def copy_queries(queries, tile, rooms, filled):
    """Begin to copy a tile's queries, as the filled-th."""
    q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride = queries
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [COPY_WARPS, 1], [1, 0])
    # Rows after the last are 0: products of zeros take less power, and power limits the clock.
    row = tile.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    is_real = row < tile.num_rows
    token, head = tile.place(gl.minimum(row, tile.num_rows - 1))
    token, head = token.to(gl.int64), head.to(gl.int64)
    of_q = token * q_stride + head * q_head_stride
    of_tail = token * q_tail_stride + head * q_tail_head_stride
    mbarrier.wait(rooms.q_free, filled % 2 ^ 1)
    copy_columns(q_tail, of_tail, is_real, rooms.q_rope, ROPE, layout)
    copy_columns(q, of_q, is_real, rooms.q_halves.index(0), HALF, layout)
    copy_columns(q + HALF, of_q, is_real, rooms.q_halves.index(1), HALF, layout)
    async_copy.mbarrier_arrive(rooms.q_full, increment_count=False)


@gluon.jit
def copy_keys(keys, table, first_slot, start, turns, queries, tile, rooms, done, filled):
    """Copy a tile's queries, and `turns` blocks of keys from the start-th key on.

    keys: k [slots, 512] and k_tail [slots, 64] with their strides; without a k_tail, it follows k
    in its rows. table: the slots of the request's keys; None if these lie side by side from
    first_slot on.
    done, filled: blocks and queries copied so far. Returns what they are afterwards.
    """
    k, k_stride, k_tail, k_tail_stride = keys
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [COPY_WARPS, 1], [1, 0])
    index = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    for turn in range(turns):
        # Keys after the last are copies of it. Their slots arrive while the ring is full.
        at = gl.minimum(start + turn * BLOCK_N + index, tile.num_keys - 1)
        if table is None:
            slots = (first_slot + at).to(gl.int64)
        else:
            slots = gl.load(table + at).to(gl.int64)
        offsets = slots * k_stride
        stage = done % rooms.STAGES
        free = done // rooms.STAGES % 2 ^ 1
        mbarrier.wait(rooms.left_free.index(stage), free)
        rope = rooms.k_rope.index(stage)
        if k_tail is None:
            copy_columns(k + RANK, offsets, None, rope, ROPE, layout)
        else:
            copy_columns(k_tail, slots * k_tail_stride, None, rope, ROPE, layout)
        copy_columns(k, offsets, None, rooms.k_left.index(stage), HALF, layout)
        async_copy.mbarrier_arrive(rooms.left_full.index(stage), increment_count=False)
        mbarrier.wait(rooms.right_free.index(stage), free)
        copy_columns(k + HALF, offsets, None, rooms.k_right.index(stage), HALF, layout)
        async_copy.mbarrier_arrive(rooms.right_full.index(stage), increment_count=False)
        if turn == 0:
            copy_queries(queries, tile, rooms, filled)
            filled += 1
        done += 1
    return done, filled


@gluon.jit
def add_values(weights, kept_share, values, acc):
    """Begin to add a block's weighted values to acc [ROWS, HALF], whose earlier ones are scaled."""
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(operand, values, rescaled(acc, kept_share), is_async=True)


@gluon.jit
def lead(start, turns, scale, tile, rooms, done, filled, passed, LAGS: gl.constexpr):
    """Compute a tile's logits and softmax, and the left half of its result.

    Returns acc [ROWS, HALF], top and mass [ROWS], top in units of log 2; and the blocks, queries
    and weights that were read, read and passed so far, which `done`, `filled` and `passed` are.
    """
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    row = tile.first_row + gl.arange(0, ROWS, rows_layout)
    acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
    # Rows after the last have weights of 0, since no logit comes near their `top`.
    top = gl.where(row < tile.num_rows, -float("inf"), LARGE)
    mass = gl.zeros([ROWS], gl.float32, rows_layout)
    end = tile.cached + gl.minimum(row, tile.num_rows - 1) // tile.GROUP + 1
    least_end = tile.cached + tile.first_row // tile.GROUP + 1
    if turns > 0:
        mbarrier.wait(rooms.q_full, filled % 2)
        filled += 1
    for turn in range(turns):
        stage = done % rooms.STAGES
        phase = done // rooms.STAGES % 2
        left, right = rooms.k_left.index(stage), rooms.k_right.index(stage)
        rope = rooms.k_rope.index(stage)
        mbarrier.wait(rooms.left_full.index(stage), phase)
        fence_async_shared()
        logits = gl.zeros([ROWS, BLOCK_N], gl.float32, logits_layout)
        logits = warpgroup_mma(
            rooms.q_rope, rope.permute([1, 0]), logits, use_acc=False, is_async=True
        )
        halves = rooms.q_halves
        logits = warpgroup_mma(halves.index(0), left.permute([1, 0]), logits, is_async=True)
        mbarrier.wait(rooms.right_full.index(stage), phase)
        fence_async_shared()
        logits = warpgroup_mma(halves.index(1), right.permute([1, 0]), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        if LAGS:
            mbarrier.arrive(rooms.multiplied)
        if turn == turns - 1:
            mbarrier.arrive(rooms.q_free)
        weights, kept_share, top, mass = weigh(
            logits, top, mass, start + turn * BLOCK_N, end, least_end, scale
        )
        weights = weights.to(rooms.q_rope.dtype)
        if LAGS:
            acc = add_values(weights, kept_share, left, acc)
        mbarrier.wait(rooms.passed_free, passed % 2 ^ 1)
        rooms.weights.store(weights)
        rooms.factors.store(kept_share)
        fence_async_shared()
        mbarrier.arrive(rooms.passed_full)
        passed += 1
        if not LAGS:
            acc = add_values(weights, kept_share, left, acc)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(rooms.left_free.index(stage))
        done += 1
    mbarrier.wait(rooms.passed_free, passed % 2 ^ 1)
    rooms.factors.store(mass)
    mbarrier.arrive(rooms.passed_full)
    top = gl.convert_layout(top * scale, acc_rows)
    mass = gl.convert_layout(mass, acc_rows)
    return acc, top, mass, done, filled, passed + 1


@gluon.jit
def follow(turns, rooms, done, passed, LAGS: gl.constexpr):
    """Compute the right half of a tile's result.

    Returns acc [ROWS, HALF] and mass [ROWS], and what `done` and `passed` are then, see `lead`.
    """
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
    for turn in range(turns):
        stage = done % rooms.STAGES
        mbarrier.wait(rooms.right_full.index(stage), done // rooms.STAGES % 2)
        mbarrier.wait(rooms.passed_full, passed % 2)
        if LAGS:
            mbarrier.wait(rooms.multiplied, (done + 1) % 2, pred=turn < turns - 1)
        fence_async_shared()
        acc = rescaled(acc, rooms.factors.load(acc_rows))
        acc = warpgroup_mma(rooms.weights, rooms.k_right.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(rooms.passed_free)
        mbarrier.arrive(rooms.right_free.index(stage))
        passed += 1
        done += 1
    mbarrier.wait(rooms.passed_full, passed % 2)
    mass = rooms.factors.load(acc_rows)
    mbarrier.arrive(rooms.passed_free)
    return acc, mass, done, passed + 1


@gluon.jit
def store_whole(acc, top, mass, results, tile, PART: gl.constexpr):
    """Store half of a tile's columns to out [T, Hq, 512], and with the left half the LSE.

    acc [ROWS, HALF], top and mass [ROWS]: as of `lead`.
    """
    out, out_stride, lse, lse_stride, v_scale = results
    layout: gl.constexpr = acc.type.layout
    columns = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    row = tile.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    has_keys = mass > 0
    safe = gl.where(has_keys, mass, 1.0)
    is_real = row < tile.num_rows
    token, head = tile.place(row)
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
