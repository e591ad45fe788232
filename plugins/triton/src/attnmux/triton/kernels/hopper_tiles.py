"""Attention of many new tokens a request on Hopper GPUs, in Gluon: `attend_tiles` with its copies
and its products in warps of their own.

One group of warps copies the keys' rows into shared memory, `STAGES` blocks ahead; `CONSUMERS`
warpgroups of 64 rows each multiply and keep the softmax. While the tensor cores work on the values
of a block, their warpgroup takes the softmax of the next one (Shah et al., FlashAttention-3,
arXiv:2407.08608, section 3.2). Blocks go from the last key to the first, so that the first block
that is waited for is the one which is masked anyway.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnmux.triton.kernels import blocks

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
"""Of a warpgroup: those of its matrix instruction."""

visible_range = gluon.jit(blocks.visible_range.fn)


@gluon.jit
def place_tile(
    item,
    cached_lens,
    encoder_lens,
    q_indptr,
    tile_request,
    tile_row,
    batch_size,
    num_tokens,
    num_tiles,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_CROSS: gl.constexpr,
    IN_CALL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Where a tile is and which blocks of keys it reads: from the one before `stop` down to
    `start`, of which those from `whole_start` to `whole_stop` hide no key from any row."""
    kv_head = item % KV_HEADS
    tile = num_tiles - 1 - item // KV_HEADS
    request = gl.load(tile_request + tile)
    first_row = gl.load(tile_row + tile)
    is_tile = request >= 0
    is_request = is_tile & (request < batch_size)
    q_begin = gl.load(q_indptr + request, mask=is_tile, other=0)
    q_end = gl.load(q_indptr + request + 1, mask=is_request, other=num_tokens)
    q_len = gl.where(is_tile, q_end - q_begin, 0)
    cached = 0
    if not IN_CALL:
        cached = gl.load(cached_lens + request, mask=is_request, other=0)
    if IS_CROSS:
        num_keys = gl.load(encoder_lens + request, mask=is_request, other=0)
    else:
        num_keys = gl.where(is_request, cached + q_len, 0)
    num_rows = q_len * GROUP
    earliest = cached + first_row // GROUP
    latest = cached + (gl.minimum(first_row + TILE_ROWS, num_rows) - 1) // GROUP
    low, least_end = visible_range(earliest, num_keys, IS_CAUSAL, WINDOW, CHUNK)
    last_first, high = visible_range(latest, num_keys, IS_CAUSAL, WINDOW, CHUNK)
    start = low // BLOCK_N
    stop = gl.maximum((gl.minimum(high, num_keys) + BLOCK_N - 1) // BLOCK_N, start)
    whole_start = gl.minimum((last_first + BLOCK_N - 1) // BLOCK_N, stop)
    whole_stop = gl.minimum(gl.maximum(least_end // BLOCK_N, whole_start), stop)
    return (
        kv_head,
        request,
        is_request,
        q_begin,
        first_row,
        num_rows,
        cached,
        num_keys,
        start,
        stop,
        whole_start,
        whole_stop,
    )


@gluon.jit
def load_slots(
    table,
    first_key,
    block,
    num_keys,
    PAGE: gl.constexpr,
    IN_CALL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    layout: gl.constexpr,
):
    """[BLOCK_N]: the rows of a block's keys. Keys behind the last are copies of it."""
    keys = gl.minimum(block * BLOCK_N + gl.arange(0, BLOCK_N, layout), num_keys - 1)
    if IN_CALL:
        slots = first_key + keys
    elif PAGE == 1:
        slots = gl.load(table + keys)
    else:
        slots = gl.load(table + keys // PAGE) * PAGE + keys % PAGE
    return slots


@gluon.jit
def copy_rows(base, slots, stride, to, D: gl.constexpr, layout: gl.constexpr):
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    # Neither is negative, and a product of unsigned numbers is one instruction.
    offsets = slots.to(gl.uint32).to(gl.uint64) * stride.to(gl.uint32).to(gl.uint64)
    places = base + columns[None, :] + offsets.to(gl.int64)[:, None]
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(to, places)


@gluon.jit
def produce(
    k,
    k_stride,
    k_head_stride,
    v,
    v_stride,
    v_head_stride,
    slots,
    slots_stride,
    rows,
    cached_lens,
    encoder_lens,
    encoder_indptr,
    q_indptr,
    tile_request,
    tile_row,
    batch_size,
    num_tokens,
    num_tiles,
    k_ring,
    v_ring,
    k_full,
    k_free,
    v_full,
    v_free,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_CROSS: gl.constexpr,
    IN_CALL: gl.constexpr,
    HAS_ENCODER: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy the rows of every tile's keys into the rings."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0]
    )
    keys_layout: gl.constexpr = gl.SliceLayout(1, layout)
    done = 0
    for item in range(gl.program_id(0), num_tiles * KV_HEADS, gl.num_programs(0)):
        (
            kv_head,
            request,
            is_request,
            q_begin,
            first_row,
            num_rows,
            cached,
            num_keys,
            start,
            stop,
            whole_start,
            whole_stop,
        ) = place_tile(
            item,
            cached_lens,
            encoder_lens,
            q_indptr,
            tile_request,
            tile_row,
            batch_size,
            num_tokens,
            num_tiles,
            KV_HEADS,
            GROUP,
            IS_CAUSAL,
            IS_CROSS,
            IN_CALL,
            WINDOW,
            CHUNK,
            TILE_ROWS,
            BLOCK_N,
        )
        if stop > start:
            table = slots
            first_key = q_begin
            if IN_CALL:
                if IS_CROSS:
                    first_key = gl.load(encoder_indptr + request)
            else:
                row = request
                if rows is not None:
                    row = gl.load(rows + request)
                table = slots + row.to(gl.int64) * slots_stride
                if HAS_ENCODER:
                    table += gl.load(encoder_lens + request)
            k_base = k + kv_head.to(gl.int64) * k_head_stride
            v_base = v + kv_head.to(gl.int64) * v_head_stride
            for turn in range(stop - start):
                # These arrive while the rings are full.
                now = load_slots(
                    table, first_key, stop - 1 - turn, num_keys, PAGE, IN_CALL, BLOCK_N, keys_layout
                )
                stage = done % STAGES
                free = (done // STAGES) % 2 ^ 1
                mbarrier.wait(k_free.index(stage), free)
                copy_rows(k_base, now, k_stride, k_ring.index(stage), D, layout)
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
                mbarrier.wait(v_free.index(stage), free)
                copy_rows(v_base, now, v_stride, v_ring.index(stage), D, layout)
                async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
                done += 1


@gluon.jit
def weigh(
    logits,
    top,
    mass,
    block,
    first,
    end,
    scale,
    cap,
    HAS_CAP: gl.constexpr,
    BEGINS: gl.constexpr,
    HIDES: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """A block's weights, and what is left of those before it; top is in the logits' unit."""
    if HAS_CAP:
        # cap * tanh(logits / cap), times log2(e); beyond 2**100 the quotient is 1 to float32.
        grown = gl.exp2(gl.minimum(logits * (scale * 2.0 * LOG2_E / cap), 100.0))
        logits = (cap - 2.0 * cap / (grown + 1.0)) * LOG2_E
        scale = 1.0
    if HIDES:
        layout: gl.constexpr = gl.SliceLayout(0, logits.type.layout)
        columns = gl.arange(0, BLOCK_N, layout)
        # Bits 1 and 2 are the thread's: without them the columns are constants.
        own = (columns & 6)[None, :] + block * BLOCK_N
        columns = (columns & (BLOCK_N - 7))[None, :]
        sees = columns < end[:, None] - own
        if BEGINS:
            sees = sees & (columns >= first[:, None] - own)
        logits = gl.where(sees, logits, -float("inf"))
    higher = gl.maximum(top, gl.max(logits, 1))
    # A row that has seen nothing yet: the difference of two infinities is no number.
    base = higher
    if HIDES:
        base = gl.where(higher == -float("inf"), 0.0, higher)
    base = base * scale
    weights = gl.exp2(logits * scale - base[:, None])
    kept_share = gl.exp2(top * scale - base)
    mass = mass * kept_share + gl.sum(weights, 1)
    return weights, kept_share, higher, mass


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """[M, N // 2] int32: two of a 16-bit dtype each. The compiler would carry halves from turn to
    turn, and put them together in each."""
    even, odd = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
        )
    return pairs


@gluon.jit
def unpack(pairs, dtype: gl.constexpr):
    """The inverse of `pack`; no instruction is left of it."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1
    )
    both = gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return both.to(dtype, bitcast=True)


@gluon.jit
def await_block(full, at, STAGES: gl.constexpr, pred=True):
    mbarrier.wait(full.index(at % STAGES), at // STAGES % 2, pred=pred)


@gluon.jit
def multiply_keys(q_tile, k_ring, at, STAGES: gl.constexpr, layout: gl.constexpr):
    """Begin the logits of the block that is the rings' at-th."""
    keys = k_ring.index(at % STAGES).permute([1, 0])
    nothing = gl.full([ROWS, keys.shape[1]], 0.0, gl.float32, layout)
    return warpgroup_mma(q_tile, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(pairs, v_ring, acc, at, STAGES: gl.constexpr):
    """Begin to add the weighted values of the block that is the rings' at-th."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(unpack(pairs, v_ring.dtype), layout)
    return warpgroup_mma(weights, v_ring.index(at % STAGES), acc, is_async=True)


@gluon.jit
def attend_range(
    acc,
    top,
    mass,
    pairs,
    turn,
    last_turn,
    turns,
    stop,
    done,
    q_tile,
    k_ring,
    v_ring,
    k_full,
    k_free,
    v_full,
    v_free,
    first,
    end,
    scale,
    cap,
    HAS_CAP: gl.constexpr,
    BEGINS: gl.constexpr,
    HIDES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    logits_layout: gl.constexpr,
):
    """Turns of a tile but the first. Each begins with its keys and the values of the turn before
    in shared memory, and with the weights of those."""
    for this in range(turn, last_turn):
        at = done + this
        logits = multiply_keys(q_tile, k_ring, at, STAGES, logits_layout)
        acc = multiply_values(pairs, v_ring, acc, at - 1, STAGES)
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k_free.index(at % STAGES))
        weights, kept_share, top, mass = weigh(
            logits,
            top,
            mass,
            stop - 1 - this,
            first,
            end,
            scale,
            cap,
            HAS_CAP,
            BEGINS,
            HIDES,
            BLOCK_N,
        )
        # Here and not where they are read: the assembler moves nothing of the softmax behind them,
        # where it would wait for the product.
        await_block(v_full, at, STAGES)
        await_block(k_full, at + 1, STAGES, this + 1 < turns)
        fence_async_shared()
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_free.index((at - 1) % STAGES))
        acc = acc * gl.convert_layout(kept_share, gl.SliceLayout(1, acc.type.layout))[:, None]
        pairs = pack(weights, q_tile.dtype)
    return acc, top, mass, pairs


@gluon.jit
def consume(
    q,
    q_stride,
    q_head_stride,
    out,
    out_stride,
    lse,
    lse_stride,
    sinks,
    cached_lens,
    encoder_lens,
    q_indptr,
    tile_request,
    tile_row,
    batch_size,
    num_tokens,
    num_tiles,
    scale,
    cap,
    v_scale,
    q_tiles,
    k_ring,
    v_ring,
    k_full,
    k_free,
    v_full,
    v_free,
    PART: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_CROSS: gl.constexpr,
    IN_CALL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The rows of every tile's part PART."""
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)
    # Whether there are rows that do not see the first keys.
    BEGINS: gl.constexpr = WINDOW >= 0 or CHUNK > 0
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_tile = q_tiles.index(PART)
    columns = gl.arange(0, D, gl.SliceLayout(0, wide))
    done = 0
    for item in range(gl.program_id(0), num_tiles * KV_HEADS, gl.num_programs(0)):
        (
            kv_head,
            request,
            is_request,
            q_begin,
            first_row,
            num_rows,
            cached,
            num_keys,
            start,
            stop,
            whole_start,
            whole_stop,
        ) = place_tile(
            item,
            cached_lens,
            encoder_lens,
            q_indptr,
            tile_request,
            tile_row,
            batch_size,
            num_tokens,
            num_tiles,
            KV_HEADS,
            GROUP,
            IS_CAUSAL,
            IS_CROSS,
            IN_CALL,
            WINDOW,
            CHUNK,
            TILE_ROWS,
            BLOCK_N,
        )
        first_row += PART * ROWS
        if request >= 0:
            acc = gl.zeros([ROWS, D], gl.float32, acc_layout)
            top = gl.full([ROWS], -float("inf"), gl.float32, rows_layout)
            mass = gl.zeros([ROWS], gl.float32, rows_layout)
            turns = stop - start
            if turns > 0:
                # Rows behind the last are copies of it.
                row = gl.minimum(
                    first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide)), num_rows - 1
                )
                token = q_begin + row // GROUP
                head = kv_head * GROUP + row % GROUP
                places = token.to(gl.int64) * q_stride + head * q_head_stride
                places = gl.multiple_of(places[:, None] + columns[None, :], [1, 8])
                places = q + gl.max_contiguous(places, [1, 8])
                places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])
                q_tile.store(gl.load(places))
                fence_async_shared()
                row = gl.minimum(first_row + gl.arange(0, ROWS, rows_layout), num_rows - 1)
                first, end = visible_range(
                    cached + row // GROUP, num_keys, IS_CAUSAL, WINDOW, CHUNK
                )

                await_block(k_full, done, STAGES)
                fence_async_shared()
                logits = multiply_keys(q_tile, k_ring, done, STAGES, logits_layout)
                logits = warpgroup_mma_wait(0, deps=[logits])
                mbarrier.arrive(k_free.index(done % STAGES))
                weights, kept_share, top, mass = weigh(
                    logits,
                    top,
                    mass,
                    stop - 1,
                    first,
                    end,
                    scale,
                    cap,
                    HAS_CAP,
                    BEGINS,
                    True,
                    BLOCK_N,
                )
                pairs = pack(weights, q_tile.dtype)
                await_block(v_full, done, STAGES)
                await_block(k_full, done + 1, STAGES, turns > 1)
                fence_async_shared()
                whole_turn = gl.maximum(stop - whole_stop, 1)
                hiding_turn = gl.maximum(stop - whole_start, whole_turn)
                for part in gl.static_range(3 if BEGINS else 2):
                    if part == 0:
                        turn, last_turn = 1, whole_turn
                    elif part == 1:
                        turn, last_turn = whole_turn, hiding_turn
                    else:
                        turn, last_turn = hiding_turn, turns
                    acc, top, mass, pairs = attend_range(
                        acc,
                        top,
                        mass,
                        pairs,
                        turn,
                        last_turn,
                        turns,
                        stop,
                        done,
                        q_tile,
                        k_ring,
                        v_ring,
                        k_full,
                        k_free,
                        v_full,
                        v_free,
                        first,
                        end,
                        scale,
                        cap,
                        HAS_CAP,
                        BEGINS,
                        part != 1,
                        BLOCK_N,
                        STAGES,
                        logits_layout,
                    )
                last = done + turns - 1
                acc = multiply_values(pairs, v_ring, acc, last, STAGES)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_free.index(last % STAGES))
                done += turns

            row = first_row + gl.arange(0, ROWS, rows_layout)
            is_real = row < num_rows
            token = q_begin + row // GROUP
            head = kv_head * GROUP + row % GROUP
            if not HAS_CAP:
                top = top * scale
            if HAS_SINKS:
                sink = gl.load(sinks + head) * LOG2_E
                higher = gl.maximum(top, sink)
                kept_share = gl.exp2(top - higher)
                mass = mass * kept_share + gl.exp2(sink - higher)
                acc = acc * gl.convert_layout(kept_share, gl.SliceLayout(1, acc_layout))[:, None]
                top = higher
            has_keys = mass > 0
            mass = gl.where(has_keys, mass, 1.0)
            share = gl.convert_layout(v_scale / mass, gl.SliceLayout(1, acc_layout))
            if HAS_LSE:
                value = gl.where(has_keys, (top + gl.log2(mass)) * LN_2, -float("inf"))
                gl.store(lse + token.to(gl.int64) * lse_stride + head, value, mask=is_real)
            # The tile of Q is read no more: its room turns the result into whole rows.
            q_tile.store((acc * share[:, None]).to(out.dtype.element_ty))
            row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
            token = q_begin + row // GROUP
            head = kv_head * GROUP + row % GROUP
            places = token.to(gl.int64) * out_stride + head * D
            places = gl.multiple_of(places[:, None] + columns[None, :], [1, 8])
            places = out + gl.max_contiguous(places, [1, 8])
            places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])
            gl.store(places, q_tile.load(wide), mask=(row < num_rows)[:, None])


@gluon.jit
def attend_hopper_tiles(
    q,
    q_stride,
    q_head_stride,
    k,
    k_stride,
    k_head_stride,
    v,
    v_stride,
    v_head_stride,
    out,
    out_stride,
    lse,
    lse_stride,
    sinks,
    slots,
    slots_stride,
    rows,
    cached_lens,
    encoder_lens,
    encoder_indptr,
    q_indptr,
    tile_request,
    tile_row,
    batch_size,
    num_tokens,
    num_tiles,
    scale,
    cap,
    v_scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_CROSS: gl.constexpr,
    IN_CALL: gl.constexpr,
    HAS_ENCODER: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: any number of programs; together they take all tiles of all KV heads.

    Rows of Q, K, V and out begin at multiples of 16 bytes; Q, K and V are of one 16-bit dtype, and
    scale is above 0. num_warps=4.
    """
    CONSUMERS: gl.constexpr = 2
    TILE_ROWS: gl.constexpr = CONSUMERS * ROWS
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], shared)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], shared)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], shared)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), COPY_WARPS * 32)
        mbarrier.init(v_full.index(stage), COPY_WARPS * 32)
        mbarrier.init(k_free.index(stage), CONSUMERS)
        mbarrier.init(v_free.index(stage), CONSUMERS)
    # fmt: off
    gl.warp_specialize(
        [
            (consume, (
                q, q_stride, q_head_stride, out, out_stride, lse, lse_stride, sinks,
                cached_lens, encoder_lens, q_indptr, tile_request, tile_row,
                batch_size, num_tokens, num_tiles, scale, cap, v_scale,
                q_tiles, k_ring, v_ring, k_full, k_free, v_full, v_free,
                0, KV_HEADS, GROUP, D, IS_CAUSAL, IS_CROSS, IN_CALL, WINDOW, CHUNK,
                HAS_CAP, HAS_SINKS, HAS_LSE, TILE_ROWS, BLOCK_N, STAGES,
            )),
            (consume, (
                q, q_stride, q_head_stride, out, out_stride, lse, lse_stride, sinks,
                cached_lens, encoder_lens, q_indptr, tile_request, tile_row,
                batch_size, num_tokens, num_tiles, scale, cap, v_scale,
                q_tiles, k_ring, v_ring, k_full, k_free, v_full, v_free,
                1, KV_HEADS, GROUP, D, IS_CAUSAL, IS_CROSS, IN_CALL, WINDOW, CHUNK,
                HAS_CAP, HAS_SINKS, HAS_LSE, TILE_ROWS, BLOCK_N, STAGES,
            )),
            (produce, (
                k, k_stride, k_head_stride, v, v_stride, v_head_stride,
                slots, slots_stride, rows, cached_lens, encoder_lens, encoder_indptr,
                q_indptr, tile_request, tile_row, batch_size, num_tokens, num_tiles,
                k_ring, v_ring, k_full, k_free, v_full, v_free,
                KV_HEADS, GROUP, D, PAGE, IS_CAUSAL, IS_CROSS, IN_CALL, HAS_ENCODER,
                WINDOW, CHUNK, TILE_ROWS, BLOCK_N, STAGES,
            )),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )
    # fmt: on
