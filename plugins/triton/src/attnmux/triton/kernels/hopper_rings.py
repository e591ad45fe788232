"""The keys of `hopper_tiles` in shared memory: rings of blocks, and the warps that fill them."""

# No annotations as strings: an aggregate looks at those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.core import _aggregate as aggregate

COLUMNS_A_COPY = gl.constexpr(8)
"""Of 16 bits: 16 bytes, the most that a thread copies at a time."""


@aggregate
class Ring:
    """Blocks of rows in shared memory. The at-th that is copied takes the place at % STAGES."""

    rows: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, D]."""
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, full, free, STAGES):
        self.rows = rows
        self.full = full
        self.free = free
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def block(self, at):
        return self.rows.index(at % self.STAGES)

    @gluon.jit
    def await_full(self, at, pred=True):
        mbarrier.wait(self.full.index(at % self.STAGES), at // self.STAGES % 2, pred=pred)

    @gluon.jit
    def await_free(self, at):
        mbarrier.wait(self.free.index(at % self.STAGES), at // self.STAGES % 2 ^ 1)

    @gluon.jit
    def fill(self, at, places):
        """Begin to copy what is at `places`; when it has come, the block is full."""
        async_copy.async_copy_global_to_shared(self.block(at), places)
        async_copy.mbarrier_arrive(self.full.index(at % self.STAGES), increment_count=False)

    @gluon.jit
    def release(self, at):
        """A warpgroup has read the block."""
        mbarrier.arrive(self.free.index(at % self.STAGES))


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    COPIERS: gl.constexpr,
    READERS: gl.constexpr,
):
    """COPIERS: threads that fill it. READERS: warpgroups that release it."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    rows = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), COPIERS)
        mbarrier.init(free.index(stage), READERS)
    return Ring(rows, full, free, STAGES)


@gluon.jit
def whole_rows(base, offsets, D: gl.constexpr, layout: gl.constexpr):
    """[M, D]: where rows that begin at multiples of 16 bytes are."""
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    places = base + columns[None, :] + offsets[:, None]
    return gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, COLUMNS_A_COPY])


@gluon.jit
def copy_block(base, stride, table, first_key, block, tile, ring, at, kind, layout: gl.constexpr):
    """Begin to copy the rows of a block of keys, as the ring's at-th."""
    keys = block * kind.BLOCK_N + gl.arange(0, kind.BLOCK_N, gl.SliceLayout(1, layout))
    # Keys behind the last are copies of it.
    keys = gl.minimum(keys, tile.num_keys - 1)
    if kind.IN_CALL:
        slots = first_key + keys
    elif kind.PAGE == 1:
        slots = gl.load(table + keys)
    else:
        slots = gl.load(table + keys // kind.PAGE) * kind.PAGE + keys % kind.PAGE
    # The slots arrive while the ring is full.
    ring.await_free(at)
    # Neither is negative, and a product of unsigned numbers is one instruction.
    offsets = slots.to(gl.uint32).to(gl.uint64) * stride.to(gl.uint32).to(gl.uint64)
    ring.fill(at, whole_rows(base, offsets.to(gl.int64), kind.D, layout))


@gluon.jit
def copy_keys(
    k,
    k_stride,
    k_head_stride,
    v,
    v_stride,
    v_head_stride,
    slots,
    slots_stride,
    rows,
    encoder_lens,
    encoder_indptr,
    tile,
    k_ring,
    v_ring,
    kind,
):
    """Fill the rings with the tile's blocks, the last one first."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, COLUMNS_A_COPY],
        [32 * COLUMNS_A_COPY // kind.D, kind.D // COLUMNS_A_COPY],
        [gl.num_warps(), 1],
        [1, 0],
    )
    turns = tile.stop - tile.start
    if turns > 0:
        table = slots
        first_key = tile.q_begin
        if kind.IN_CALL:
            if kind.IS_CROSS:
                first_key = gl.load(encoder_indptr + tile.request)
        else:
            row = tile.request
            if rows is not None:
                row = gl.load(rows + row)
            table = slots + row.to(gl.int64) * slots_stride
            if kind.HAS_ENCODER:
                table += gl.load(encoder_lens + tile.request)
        k += tile.kv_head.to(gl.int64) * k_head_stride
        v += tile.kv_head.to(gl.int64) * v_head_stride
        last = tile.stop - 1
        copy_block(k, k_stride, table, first_key, last, tile, k_ring, 0, kind, layout)
        # A block's keys are wanted a turn before its values.
        for at in range(1, turns):
            block = last - at
            copy_block(k, k_stride, table, first_key, block, tile, k_ring, at, kind, layout)
            copy_block(v, v_stride, table, first_key, block + 1, tile, v_ring, at - 1, kind, layout)
        at = turns - 1
        copy_block(v, v_stride, table, first_key, tile.start, tile, v_ring, at, kind, layout)
