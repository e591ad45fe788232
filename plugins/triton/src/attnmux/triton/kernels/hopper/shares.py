"""`attend_shares` for Hopper GPUs, in Gluon, with copies in warps of their own.

These copy a program's whole line of blocks into rings in shared memory: neither a new item nor the
softmax interrupts the reading of memory. In the product of keys and queries, keys are the rows and
queries the columns: a request has few queries, and a matrix instruction has 64 rows but as few as 8
columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmux.triton.kernels.hopper.copies import COPY_WARPS, copy_shares, share_ring
from attnmux.triton.kernels.hopper.eight_bits import (
    load_keys,
    load_values,
    order_values,
    store_halves,
)
from attnmux.triton.kernels.hopper.share_results import parts_of, pass_part, store_rows
from attnmux.triton.kernels.hopper.walk import (
    ShareKind,
    after_share,
    first_unit,
    place_share,
    visible_range,
)
from attnmux.triton.kernels.hopper.weights import capped


@gluon.jit
def multiply_keys(ring, at, q, layout: gl.constexpr):
    """The logits [BLOCK_N, BLOCK_M] of the ring's at-th block of keys. q [D, BLOCK_M]."""
    ring.await_full(at)
    fence_async_shared()
    k = ring.block(at)
    BLOCK_N: gl.constexpr = k.shape[0]
    BLOCK_M: gl.constexpr = q.shape[1]
    logits = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    if k.dtype.primitive_bitwidth == 8:
        operand = load_keys(k, gl.DotOperandLayout(0, layout, 2))
        ring.release(at)
        logits = warpgroup_mma(operand, q, logits, use_acc=False, is_async=True)
        return warpgroup_mma_wait(0, [logits])
    else:
        logits = warpgroup_mma(k, q, logits, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, [logits])
        ring.release(at)
        return logits


@gluon.jit
def multiply_values(ring, at, weights, acc):
    """Add the ring's at-th block of values to acc [DV, BLOCK_M]. weights [BLOCK_M, BLOCK_N]."""
    ring.await_full(at)
    fence_async_shared()
    v = ring.block(at)
    if v.dtype.primitive_bitwidth == 8:
        operand = load_values(v, gl.DotOperandLayout(0, acc.type.layout, 2))
        ring.release(at)
        acc = warpgroup_mma(operand, weights.permute([1, 0]), acc, is_async=True)
        return warpgroup_mma_wait(0, [acc])
    else:
        acc = warpgroup_mma(v.permute([1, 0]), weights.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        ring.release(at)
        return acc


@gluon.jit
def in_log2(logits, scale, cap, HAS_CAP: gl.constexpr):
    """The logits [BLOCK_N, BLOCK_M] in units of log 2. scale: a number, or [1, BLOCK_M]; times
    log2(e), unless HAS_CAP."""
    if HAS_CAP:
        logits = capped(logits, scale, cap)
    else:
        logits = logits * scale
    return logits


@gluon.jit
def attend_item(
    q, scale, weights_tile, rings, at, start, turns, of_request, item, masks, cap, kind
):  # fmt: skip
    """The softmax over `turns` blocks of an item's keys, beginning with the rings' at-th: acc
    [DV, BLOCK_M], top and mass [BLOCK_M], as in `attend_blocks`."""
    k_ring, v_ring = rings
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, kind.BLOCK_M, 16]
    )
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    request, _before, _units, _blocks_each, cached, num_keys, _row = of_request
    mask, mask_indptr, first_keys = masks
    key = gl.arange(0, kind.BLOCK_N, gl.SliceLayout(1, layout))
    row = item % kind.TILES * kind.BLOCK_M + gl.arange(0, kind.BLOCK_M, by_row)
    order = gl.minimum(row, kind.ROWS - 1) // kind.GROUP
    first, end = visible_range(
        cached + order, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK
    )  # fmt: skip
    # Between these keys all rows see every key.
    whole_start, _ = visible_range(
        cached + kind.QUERIES - 1, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK
    )  # fmt: skip
    _, whole_stop = visible_range(cached, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK)
    mask_rows = order
    mask_start = 0
    if kind.IS_TREE:
        token = request * kind.QUERIES + order
        first = gl.load(first_keys + token)
        end = order * 0 + num_keys
        mask_rows = mask + token.to(gl.int64) * kind.QUERIES - cached
        mask_start = cached
        whole_stop = cached
    elif kind.HAS_MASK:
        mask_rows = mask + gl.load(mask_indptr + request) + order.to(gl.int64) * num_keys
        whole_stop = 0

    acc = gl.zeros([kind.DV, kind.BLOCK_M], gl.float32, layout)
    top = gl.full([kind.BLOCK_M], -float("inf"), gl.float32, by_row)
    # Added up at the end: a sum over keys involves all warps.
    masses = gl.zeros([kind.BLOCK_N, kind.BLOCK_M], gl.float32, layout)
    for turn in range(turns):
        block = start + turn * kind.BLOCK_N
        logits = multiply_keys(k_ring, at + turn, q, layout)
        logits = in_log2(logits, scale, cap, kind.HAS_CAP)
        if (block + kind.BLOCK_N > whole_stop) | (block < whole_start):
            keys = (block + key)[:, None]
            sees = (keys >= first[None, :]) & (keys < end[None, :])
            if kind.HAS_MASK:
                is_masked = sees & (keys >= mask_start)
                kept = gl.load(mask_rows[None, :] + keys, mask=is_masked, other=1)
                sees = sees & (kept != 0)
            logits = gl.where(sees, logits, -float("inf"))
        higher = gl.maximum(top, gl.max(logits, 0))
        # A row that has seen no key yet: inf - inf is NaN.
        base = gl.where(higher == -float("inf"), 0.0, higher)
        weights = gl.exp2(logits - base[None, :])
        kept_share = gl.exp2(top - base)[None, :]
        masses = masses * kept_share + weights
        weights_tile.permute([1, 0]).store(weights.to(weights_tile.dtype))
        fence_async_shared()
        acc = multiply_values(v_ring, at + turn, weights_tile, acc * kept_share)
        top = higher
    return acc, top, gl.sum(masses, 0)


@gluon.jit
def attend_line(
    results, sinks, masks, plan, encoder_lens, buffers, q_ring, rings, halves, weights_tile,
    factors,
    PART_ROWS: gl.constexpr, PARTS: gl.constexpr, MOST_PARTS: gl.constexpr, kind,
):  # fmt: skip
    """The softmax over the keys that `copy_shares` copies, and the merging of partial results."""
    scale, cap, v_scale = factors
    IS_EIGHT_BITS: gl.constexpr = rings[0].rows.dtype.primitive_bitwidth == 8
    by_row: gl.constexpr = gl.SliceLayout(
        0, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, kind.BLOCK_M, 16])
    )
    unit, last, of_request = first_unit(plan, gl.program_id(0))
    taken = gl.load(plan[3])
    q_at = 0
    at = 0
    while unit < last:
        item, item_begin, count, start, turns = place_share(unit, last, of_request, kind)
        request, _before, units, _blocks_each, _cached, _num_keys, _row = of_request
        q_ring.await_full(q_at)
        q = q_ring.block(q_at)
        q_scale = scale
        if IS_EIGHT_BITS:
            q_scale = (scale * store_halves(q, halves, by_row))[None, :]
            q = halves
        acc, top, mass = attend_item(
            q.permute([1, 0]), q_scale, weights_tile, rings, at, start, turns, of_request, item,
            masks, cap, kind,
        )  # fmt: skip
        q_ring.release(q_at)
        q_at += 1
        at += turns
        if IS_EIGHT_BITS:
            acc = order_values(acc)
        acc = acc.permute([1, 0])
        rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        top = gl.convert_layout(top, rows)
        mass = gl.convert_layout(mass, rows)
        if count == units:
            store_rows(results, sinks, acc, top, mass, v_scale, request, item, kind)
        else:
            counter = request * kind.ITEMS + item
            parts = parts_of(buffers, item_begin, units, taken, counter, kind)
            part = unit if kind.IS_FIXED else gl.program_id(0)
            pass_part(
                results, sinks, parts, part, acc, top, mass, v_scale, request, item,
                PART_ROWS, PARTS, MOST_PARTS, kind,
            )  # fmt: skip
        unit += count
        of_request = after_share(unit, last, of_request, plan, encoder_lens, kind)


@gluon.jit(
    do_not_specialize_on_alignment=[
        "rows",
        "lens",
        "encoder_lens",
        "mask",
        "mask_indptr",
        "first_keys",
    ],
)
def attend_shares(
    q, q_stride, q_head_stride, k, k_stride, k_head_stride, v, v_stride, v_head_stride,
    out, out_stride, lse, lse_stride, sinks, slots, slots_stride,
    rows, lens, encoder_lens, mask, mask_indptr, first_keys, stops, unit_blocks, starts, share,
    partial, partial_lse, arrivals, span_arrivals, scale, cap, v_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr, LENS_SHIFT: gl.constexpr,
    REAL_D: gl.constexpr, REAL_TAIL: gl.constexpr, REAL_DV: gl.constexpr, PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr, IS_CROSS: gl.constexpr, HAS_ENCODER: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_MASK: gl.constexpr,
    IS_TREE: gl.constexpr, IS_FIXED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    PART_ROWS: gl.constexpr, PARTS: gl.constexpr, MOST_PARTS: gl.constexpr, STAGES: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid and arguments as of the portable `attend_shares`. num_warps=4.

    q [T, Hq, REAL_D + REAL_TAIL] of a 16-bit dtype, k [slots, Hkv, REAL_D + REAL_TAIL] and v
    [slots, Hkv, REAL_DV] of that dtype or of 8-bit floats; 33 to 256 columns, multiples of 16. Rows
    of q, k and v begin at multiples of 16 bytes. out, lse, sinks, slots, rows, lens,
    encoder_lens, mask, mask_indptr, first_keys, stops, unit_blocks, starts, share, partial,
    partial_lse and arrivals: as there. span_arrivals [places] int32: the parts of each span that
    are done, at the place of its first part; 0 before and after. BLOCK_M: rows of a tile, at least
    8. BLOCK_N: a multiple of 64. MOST_PARTS: parts of an item that are merged in one step; 0 if
    no item has more. STAGES: blocks in the rings, keys and values counted apart.
    COPY_REGISTERS, a multiple of 8: registers of each thread that copies.
    """
    q_type: gl.constexpr = q.dtype.element_ty
    k_type: gl.constexpr = k.dtype.element_ty
    w_type: gl.constexpr = gl.float16 if k_type.primitive_bitwidth == 8 else q_type
    gl.static_assert(STAGES % 2 == 0 and BLOCK_N % 64 == 0)
    kind = ShareKind(
        KV_HEADS=KV_HEADS, GROUP=GROUP, QUERIES=QUERIES, LENS_SHIFT=LENS_SHIFT,
        REAL_D=REAL_D + REAL_TAIL, REAL_DV=REAL_DV, PAGE=PAGE, IS_CAUSAL=IS_CAUSAL,
        IS_CROSS=IS_CROSS, HAS_ENCODER=HAS_ENCODER, WINDOW=WINDOW, CHUNK=CHUNK, HAS_CAP=HAS_CAP,
        HAS_MASK=HAS_MASK, IS_TREE=IS_TREE, IS_FIXED=IS_FIXED, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, kind.D], q_type)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], w_type)
    k_ring = share_ring(k_type, BLOCK_N, kind.D, STAGES // 2)
    v_ring = share_ring(k_type, BLOCK_N, kind.DV, STAGES // 2)
    rings = k_ring, v_ring
    # Room for the queries of this item and the next.
    q_ring = share_ring(q_type, BLOCK_M, kind.D, 2)
    weights_tile = gl.allocate_shared_memory(w_type, [BLOCK_M, BLOCK_N], w_layout)
    halves = weights_tile
    if k_type.primitive_bitwidth == 8:
        halves = gl.allocate_shared_memory(w_type, [BLOCK_M, kind.D], q_layout)
    # The previous launch's results are visible from here on.
    gdc_wait()
    gdc_launch_dependents()
    plan = (stops, unit_blocks, starts, share, lens, rows)
    gl.warp_specialize(
        [
            (attend_line, (
                (out, out_stride, lse, lse_stride), sinks, (mask, mask_indptr, first_keys), plan,
                encoder_lens, (partial, partial_lse, arrivals, span_arrivals),
                q_ring, rings, halves, weights_tile,
                (scale, cap, v_scale), PART_ROWS, PARTS, MOST_PARTS, kind,
            )),
            (copy_shares, (
                (q, q_stride, q_head_stride),
                (k, k_stride, k_head_stride, v, v_stride, v_head_stride),
                (slots, slots_stride), plan, encoder_lens, q_ring, rings, kind,
            )),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )  # fmt: skip
