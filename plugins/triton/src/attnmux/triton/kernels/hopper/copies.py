"""Rings of blocks in shared memory, and the warps that fill them, for Hopper GPUs."""

# No annotations as strings: an aggregate reads those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.core import _aggregate as aggregate

from attnmux.triton.kernels import widen
from attnmux.triton.kernels.hopper.gluon_names import copy_to_shared, next_power_of_2
from attnmux.triton.kernels.hopper.walk import after_share, first_unit, place_rows, place_share

PIECE = gl.constexpr(widen.PIECE.value)
COPIED_BITS = gl.constexpr(128)
"""The most that a thread copies at a time."""
COPY_WARPS = gl.constexpr(4)
"""Warps of `shares` that copy."""


@aggregate
class Ring:
    """Blocks of rows in shared memory. The at-th block takes the place at % STAGES."""

    rows: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, D]."""
    tails: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, TAIL]: the columns after the first D; `rows` if there are none."""
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    TAIL: gl.constexpr
    REAL_TAIL: gl.constexpr
    """Columns of a tail that rows have; the rest of TAIL is 0."""

    @gluon.constexpr_function
    def __init__(self, rows, tails, full, free, STAGES, TAIL=0, REAL_TAIL=0):
        self.rows = rows
        self.tails = tails
        self.full = full
        self.free = free
        self.STAGES = gl.constexpr(STAGES)
        self.TAIL = gl.constexpr(TAIL)
        self.REAL_TAIL = gl.constexpr(REAL_TAIL)

    @gluon.jit
    def block(self, at):
        return self.rows.index(at % self.STAGES)

    @gluon.jit
    def tail(self, at):
        return self.tails.index(at % self.STAGES)

    @gluon.jit
    def await_full(self, at, pred=True):
        mbarrier.wait(self.full.index(at % self.STAGES), at // self.STAGES % 2, pred=pred)

    @gluon.jit
    def await_free(self, at):
        mbarrier.wait(self.free.index(at % self.STAGES), at // self.STAGES % 2 ^ 1)

    @gluon.jit
    def fill(self, at):
        """The block is full when this thread's copies have arrived, and those of the others."""
        async_copy.mbarrier_arrive(self.full.index(at % self.STAGES), increment_count=False)

    @gluon.jit
    def release(self, at):
        """A warpgroup has read the block."""
        mbarrier.arrive(self.free.index(at % self.STAGES))


@gluon.constexpr_function
def tail_width(real: int) -> int:
    """Columns of a tail as it is computed: the next power of 2, at least 16; 0 without one."""
    return max(16, next_power_of_2(real)) if real else 0


@gluon.jit
def allocate_rows(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    REAL_TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    COPIERS: gl.constexpr,
    READERS: gl.constexpr,
):
    """COPIERS: threads that fill it. READERS: warpgroups that release it."""
    TAIL: gl.constexpr = tail_width(REAL_TAIL)
    rows = allocate_rows(dtype, STAGES, BLOCK_N, D)
    tails = rows
    if TAIL > 0:
        tails = allocate_rows(dtype, STAGES, BLOCK_N, TAIL)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), COPIERS)
        mbarrier.init(free.index(stage), READERS)
    return Ring(rows, tails, full, free, STAGES, TAIL, REAL_TAIL)


@gluon.constexpr_function
def copy_layout(bits: int, width: int, num_warps: int) -> gl.BlockedLayout:
    """16 bytes a thread, whole rows first."""
    columns = 128 // bits
    threads = width // columns
    return gl.BlockedLayout([1, columns], [32 // threads, threads], [num_warps, 1], [1, 0])


@gluon.jit
def columns_before(REAL: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """[1, WIDTH] bool: the first REAL ones."""
    return gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :] < REAL


@gluon.jit
def whole_rows(base, offsets, D: gl.constexpr, layout: gl.constexpr):
    """[M, D] addresses of rows that begin at multiples of 16 bytes."""
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    places = base + columns[None, :] + offsets[:, None]
    COLUMNS: gl.constexpr = COPIED_BITS // base.dtype.element_ty.primitive_bitwidth
    return gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, COLUMNS])


@gluon.jit
def slots_in_block(table, first_key, block, tile, kind, layout: gl.constexpr):
    """Where the rows of a block of keys are. table: None if they lie side by side."""
    keys = block * kind.BLOCK_N + gl.arange(0, kind.BLOCK_N, gl.SliceLayout(1, layout))
    # Keys after the last are copies of it.
    keys = gl.minimum(keys, tile.num_keys - 1)
    if table is None:
        slots = first_key + keys
    elif kind.PAGE == 1:
        slots = gl.load(table + keys)
    else:
        slots = gl.load(table + keys // kind.PAGE) * kind.PAGE + keys % kind.PAGE
    # Neither is negative, and a product of unsigned numbers is one instruction.
    return slots.to(gl.uint32).to(gl.uint64)


@gluon.jit
def offsets_of(slots, stride):
    return (slots * stride.to(gl.uint32).to(gl.uint64)).to(gl.int64)


@gluon.jit
def copy_block(base, stride, table, first_key, block, tile, ring, at, kind):
    """Begin to copy the rows of a block of keys, as the ring's at-th."""
    bits: gl.constexpr = ring.rows.dtype.primitive_bitwidth
    layout: gl.constexpr = copy_layout(bits, kind.D, gl.num_warps())
    slots = slots_in_block(table, first_key, block, tile, kind, layout)
    if ring.TAIL > 0:
        narrow: gl.constexpr = copy_layout(16, ring.TAIL, gl.num_warps())
        tail_slots = slots_in_block(table, first_key, block, tile, kind, narrow)
    # The slots arrive while the ring is full.
    ring.await_free(at)
    places = whole_rows(base, offsets_of(slots, stride), kind.D, layout)
    copy_to_shared(ring.block(at), places)
    if ring.TAIL > 0:
        places = whole_rows(base + kind.D, offsets_of(tail_slots, stride), ring.TAIL, narrow)
        if ring.TAIL == ring.REAL_TAIL:
            copy_to_shared(ring.tail(at), places)
        else:
            is_real = columns_before(ring.REAL_TAIL, ring.TAIL, narrow)
            copy_to_shared(ring.tail(at), places, mask=is_real)
    ring.fill(at)


@gluon.jit
def copy_turned(base, stride, first_piece, block, ring, at, kind):
    """Begin to copy a block's values [D, BLOCK_N] as the ring's at-th, out of pieces [D, PIECE]."""
    layout: gl.constexpr = copy_layout(8, kind.BLOCK_N, gl.num_warps())
    keys = gl.arange(0, kind.BLOCK_N, gl.SliceLayout(0, layout))
    columns = gl.arange(0, kind.D, gl.SliceLayout(1, layout))
    first = (first_piece + block * (kind.BLOCK_N // PIECE)).to(gl.int64) * stride
    places = base + first + (keys // PIECE * stride + keys % PIECE)[None, :]
    places += (columns * PIECE)[:, None]
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 16])
    ring.await_free(at)
    copy_to_shared(ring.block(at), places)
    ring.fill(at)


@gluon.jit
def copy_values(v, v_stride, table, first_value, block, tile, ring, at, kind):
    if kind.ROUNDS_WEIGHTS:
        copy_turned(v, v_stride, first_value, block, ring, at, kind)
    else:
        copy_block(v, v_stride, table, first_value, block, tile, ring, at, kind)


@gluon.jit
def copy_keys(
    k, k_stride, k_head_stride, v, v_stride, v_head_stride, slots, slots_stride,
    rows, v_starts, encoder_lens, encoder_indptr, tile, k_ring, v_ring, kind,
):  # fmt: skip
    """Fill the rings with the tile's blocks, from the last to the first."""
    turns = tile.stop - tile.start
    if turns > 0:
        first_key = tile.q_begin
        if kind.IN_CALL:
            table = None
            if kind.IS_CROSS:
                first_key = gl.load(encoder_indptr + tile.request)
        else:
            row = tile.request
            if rows is not None:
                row = gl.load(rows + row)
            table = slots + row.to(gl.int64) * slots_stride
            if kind.HAS_ENCODER:
                table += gl.load(encoder_lens + tile.request)
        v_table = table
        first_value = first_key
        if v_starts is not None:
            v_table = None
            first_value = gl.load(v_starts + tile.request)
        k += tile.kv_head.to(gl.int64) * k_head_stride
        v += tile.kv_head.to(gl.int64) * v_head_stride
        last = tile.stop - 1
        copy_block(k, k_stride, table, first_key, last, tile, k_ring, 0, kind)
        # A block's keys are needed a turn before its values.
        for at in range(1, turns):
            block = last - at
            copy_block(k, k_stride, table, first_key, block, tile, k_ring, at, kind)
            copy_values(v, v_stride, v_table, first_value, block + 1, tile, v_ring, at - 1, kind)
        at = turns - 1
        copy_values(v, v_stride, v_table, first_value, tile.start, tile, v_ring, at, kind)


@gluon.jit
def share_ring(dtype: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """A ring of blocks that one warpgroup reads. The layout is that of matrix instructions, except
    for 8 bits, which no instruction multiplies with 16."""
    layout: gl.constexpr = (
        gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
        if dtype.primitive_bitwidth == 16
        else gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    )
    rows = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 32 * COPY_WARPS)
        mbarrier.init(free.index(stage), 1)
    return Ring(rows, rows, full, free, STAGES)


@gluon.jit
def copy_rows(base, offsets, is_there, ring, at, REAL: gl.constexpr, layout: gl.constexpr):
    """Begin to copy rows of REAL columns as the ring's at-th block, with 0 in its other columns and
    where is_there is False."""
    WIDTH: gl.constexpr = ring.rows.shape[2]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    places = base + offsets[:, None] + columns[None, :]
    mask = is_there[:, None]
    if REAL < WIDTH:
        mask = mask & columns_before(REAL, WIDTH, layout)
    ring.await_free(at)
    copy_to_shared(ring.block(at), places, mask=mask)
    async_copy.mbarrier_arrive(ring.full.index(at % ring.STAGES), increment_count=False)


@gluon.jit
def copy_queries(q, q_stride, q_head_stride, request, item, ring, at, kind):
    layout: gl.constexpr = copy_layout(q.dtype.element_ty.primitive_bitwidth, kind.D, COPY_WARPS)
    row = item % kind.TILES * kind.BLOCK_M + gl.arange(0, kind.BLOCK_M, gl.SliceLayout(1, layout))
    # Rows after the last are not copied, but their addresses are computed.
    token, head = place_rows(gl.minimum(row, kind.ROWS - 1), request, item // kind.TILES, kind)
    offsets = token * q_stride + head * q_head_stride
    copy_rows(q, offsets, row < kind.ROWS, ring, at, kind.REAL_D, layout)


@gluon.jit
def slots_of(table, keys, num_keys, kind):
    """The slots or pages of keys; 0 for keys after the last."""
    return gl.load(table + keys // kind.PAGE, mask=keys < num_keys, other=0)


@gluon.jit
def copy_shares(queries, keys, table, plan, encoder_lens, q_ring, rings, kind):
    """Copy each unit's queries, then its keys and values, block by block."""
    q, q_stride, q_head_stride = queries
    k, k_stride, k_head_stride, v, v_stride, v_head_stride = keys
    slots, slots_stride = table
    k_ring, v_ring = rings
    bits: gl.constexpr = k.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = copy_layout(bits, kind.D, COPY_WARPS)
    v_layout: gl.constexpr = copy_layout(bits, kind.DV, COPY_WARPS)
    key = gl.arange(0, kind.BLOCK_N, gl.SliceLayout(1, layout))
    unit, last, of_request = first_unit(plan, gl.program_id(0))
    q_at = 0
    at = 0
    while unit < last:
        item, _, count, start, turns = place_share(unit, last, of_request, kind)
        request, _before, _units, _blocks_each, _cached, num_keys, row = of_request
        row_of_table = slots + row.to(gl.int64) * slots_stride
        if kind.HAS_ENCODER:
            row_of_table += gl.load(encoder_lens + request)
        kv_head = (item // kind.TILES).to(gl.int64)
        keys_now = start + key
        slots_now = slots_of(row_of_table, keys_now, num_keys, kind)
        copy_queries(q, q_stride, q_head_stride, request, item, q_ring, q_at, kind)
        q_at += 1
        for _ in range(turns):
            # The slots of the next block arrive while the ring is full.
            slots_next = slots_of(row_of_table, keys_now + kind.BLOCK_N, num_keys, kind)
            slot = slots_now.to(gl.int64)
            if kind.PAGE > 1:
                slot = slot * kind.PAGE + keys_now % kind.PAGE
            is_there = keys_now < num_keys
            k_head = k + kv_head * k_head_stride
            copy_rows(k_head, slot * k_stride, is_there, k_ring, at, kind.REAL_D, layout)
            v_head = v + kv_head * v_head_stride
            offsets = slot * v_stride
            if kind.D != kind.DV:
                by_key: gl.constexpr = gl.SliceLayout(1, v_layout)
                offsets = gl.convert_layout(offsets, by_key)
                is_there = gl.convert_layout(is_there, by_key)
            copy_rows(v_head, offsets, is_there, v_ring, at, kind.REAL_DV, v_layout)
            keys_now += kind.BLOCK_N
            slots_now = slots_next
            at += 1
        unit += count
        of_request = after_share(unit, last, of_request, plan, encoder_lens, kind)
