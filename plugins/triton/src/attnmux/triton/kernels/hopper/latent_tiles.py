"""`attend_tiles` for absorbed MLA on Hopper GPUs, in Gluon.

A program attends from one tile, as `latent_tile.py` does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmux.triton.kernels.hopper.latent_tile import (
    BLOCK_N,
    COPY_WARPS,
    ROWS,
    LatentTile,
    copy_keys,
    follow,
    lead,
    make_rooms,
    store_whole,
)
from attnmux.triton.kernels.hopper.places import Kind, place_tile


@gluon.jit
def copy_tile(queries, keys, slots, slots_stride, rows, tile, placed, rooms):
    turns = placed.stop - placed.start
    table = slots
    if slots is not None:
        row = placed.request
        if rows is not None:
            row = gl.load(rows + row, mask=row >= 0, other=0)
        table = slots + row.to(gl.int64) * slots_stride
    start = placed.start * BLOCK_N
    none = gl.to_tensor(0)
    copy_keys(keys, table, placed.q_begin, start, turns, queries, tile, rooms, none, none)


@gluon.jit
def attend_half(results, scale, tile, placed, rooms, PART: gl.constexpr):
    """Compute and store the left or, with PART 1, the right half of the tile's result."""
    turns = placed.stop - placed.start
    none = gl.to_tensor(0)
    if PART == 0:
        start = placed.start * BLOCK_N
        acc, top, mass, _, _, _ = lead(start, turns, scale, tile, rooms, none, none, none, True)
    else:
        acc, mass, _, _ = follow(turns, rooms, none, none, True)
        top = mass
    store_whole(acc, top, mass, results, tile, PART)


@gluon.jit(
    do_not_specialize=["batch_size", "num_tokens", "num_tiles", "num_splits"],
    do_not_specialize_on_alignment=["rows", "cached_lens"],
)
def attend_latent_tiles(
    q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride, k, k_stride, k_tail,
    k_tail_stride, out, out_stride, lse, lse_stride, slots, slots_stride, rows, cached_lens,
    q_indptr, tile_request, tile_row, batch_size, num_tokens, num_tiles, num_splits, scale, v_scale,
    GROUP: gl.constexpr, IN_CALL: gl.constexpr, SPLIT_BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid and arguments as of `attend_tiles`; num_warps=4, BLOCK_M=64, blocks of 64 keys.

    q [T, GROUP, 512], q_tail [T, GROUP, 64], k [slots, 512], which is also the values, k_tail
    [slots, 64], and out [T, GROUP, 512]: of one 16-bit dtype, rows at multiples of 16 bytes. lse,
    slots, rows, cached_lens, q_indptr, tile_request and tile_row: as there; slots: page size 1.
    scale: times log2(e), above 0. Rows are causal, without a window.
    """
    gl.static_assert(BLOCK_M == ROWS)
    kind = Kind(
        GROUP=GROUP, D=512, K_TAIL=64, V_TAIL=0, PAGE=1, IS_CAUSAL=True, IS_CROSS=False,
        IN_CALL=IN_CALL, HAS_ENCODER=False, WINDOW=-1, CHUNK=0, HAS_CAP=False,
        SPLIT_BLOCKS=SPLIT_BLOCKS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ROUNDS_QUERIES=False,
        ROUNDS_WEIGHTS=False,
    )  # fmt: skip
    placed = place_tile(
        cached_lens, None, q_indptr, tile_request, tile_row,
        batch_size, num_tokens, num_tiles, num_splits, kind,
    )  # fmt: skip
    tile = LatentTile(
        GROUP,
        first_row=placed.first_row,
        num_rows=placed.num_rows,
        first_token=placed.q_begin,
        cached=placed.cached,
        num_keys=placed.num_keys,
    )
    if SPLIT_BLOCKS > 0:
        split = gl.program_id(2).to(gl.int64)
        out += split * num_tokens * out_stride
        lse += split * num_tokens * lse_stride
    rooms = make_rooms(q.dtype.element_ty, STAGES)
    queries = (q, q_stride, q_head_stride, q_tail, q_tail_stride, q_tail_head_stride)
    keys = (k, k_stride, k_tail, k_tail_stride)
    results = (out, out_stride, lse, lse_stride, v_scale)
    gl.warp_specialize(
        [
            (attend_half, (results, scale, tile, placed, rooms, 0)),
            (attend_half, (results, scale, tile, placed, rooms, 1)),
            (copy_tile, (queries, keys, slots, slots_stride, rows, tile, placed, rooms)),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
