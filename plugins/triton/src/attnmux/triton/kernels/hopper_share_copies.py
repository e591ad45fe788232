"""The warps of `hopper_shares` that bring queries and keys into shared memory."""

# No annotations as strings, see `hopper_rings`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from attnmux.triton.kernels.hopper_rings import Ring
from attnmux.triton.kernels.hopper_share_kind import after_share, place_rows, place_share
from attnmux.triton.kernels.hopper_walk import first_unit

COPY_WARPS = gl.constexpr(4)


@gluon.jit
def share_ring(dtype: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """A ring of blocks that one warpgroup reads: by matrix instructions, unless they are of 8 bits,
    which no instruction multiplies with 16."""
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
    return Ring(rows, full, free, STAGES)


@gluon.constexpr_function
def rows_layout(bits: int, width: int) -> gl.BlockedLayout:
    """16 bytes a thread, whole rows first."""
    columns = 128 // bits
    return gl.BlockedLayout(
        [1, columns], [32 * columns // width, width // columns], [COPY_WARPS.value, 1], [1, 0]
    )


@gluon.jit
def copy_rows(base, offsets, is_there, ring, at, D: gl.constexpr, layout: gl.constexpr):
    """Begin to copy rows as the ring's at-th block, 0 where there is none."""
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    places = base + offsets[:, None] + columns[None, :]
    ring.await_free(at)
    async_copy.async_copy_global_to_shared(ring.block(at), places, mask=is_there[:, None])
    async_copy.mbarrier_arrive(ring.full.index(at % ring.STAGES), increment_count=False)


@gluon.jit
def copy_queries(q, q_stride, q_head_stride, request, item, ring, at, kind):
    layout: gl.constexpr = rows_layout(q.dtype.element_ty.primitive_bitwidth, kind.D)
    row = item % kind.TILES * kind.BLOCK_M + gl.arange(0, kind.BLOCK_M, gl.SliceLayout(1, layout))
    # Rows behind the last are not copied, yet their addresses are looked at.
    token, head = place_rows(gl.minimum(row, kind.ROWS - 1), request, item // kind.TILES, kind)
    offsets = token * q_stride + head * q_head_stride
    copy_rows(q, offsets, row < kind.ROWS, ring, at, kind.D, layout)


@gluon.jit
def slots_of(table, keys, num_keys, kind):
    """Which slots keys are in, or which pages; 0 for keys behind the last."""
    return gl.load(table + keys // kind.PAGE, mask=keys < num_keys, other=0)


@gluon.jit
def copy_shares(queries, keys, table, plan, encoder_lens, q_ring, ring, kind):
    """Each unit's queries, then its keys and values, block by block."""
    q, q_stride, q_head_stride = queries
    k, k_stride, k_head_stride, v, v_stride, v_head_stride = keys
    slots, slots_stride = table
    layout: gl.constexpr = rows_layout(k.dtype.element_ty.primitive_bitwidth, kind.D)
    key = gl.arange(0, kind.BLOCK_N, gl.SliceLayout(1, layout))
    unit, last, of_request = first_unit(plan)
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
            # The slots of the next block arrive while this one is waited for.
            slots_next = slots_of(row_of_table, keys_now + kind.BLOCK_N, num_keys, kind)
            slot = slots_now.to(gl.int64)
            if kind.PAGE > 1:
                slot = slot * kind.PAGE + keys_now % kind.PAGE
            is_there = keys_now < num_keys
            k_head = k + kv_head * k_head_stride
            copy_rows(k_head, slot * k_stride, is_there, ring, at, kind.D, layout)
            v_head = v + kv_head * v_head_stride
            copy_rows(v_head, slot * v_stride, is_there, ring, at + 1, kind.D, layout)
            keys_now += kind.BLOCK_N
            slots_now = slots_next
            at += 2
        unit += count
        of_request = after_share(unit, last, of_request, plan, encoder_lens, kind)
