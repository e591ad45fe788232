"""Merges the partial results of `attend_latent`: the softmax over an item's parts.

The parts of one long request are megabytes, so a program takes a slice of an item's rows and
columns instead of the item.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attnmux.triton.kernels.blocks import LN_2
from attnmux.triton.launches.shapes import next_power_of_2

WIDTH = tl.constexpr(512)
"""Columns of a result."""
TILE = tl.constexpr(64)
"""Rows of an item, as `hopper.latent.ROWS`."""
HELD = 4096
"""Values that a program holds at a time."""


def merge_slices(items: int, part_rows: int, compute_units: int) -> tuple[int, dict[str, int]]:
    """Slices of an item, and the constants of `merge_latent` for them: about eight programs a
    compute unit. Most read all of their parts at once.

    items: of all requests together. part_rows: rows of a part.
    """
    whole = part_rows * WIDTH.value
    fair = next_power_of_2(items * whole // (8 * compute_units))
    each = min(max(fair, 128), HELD, whole)
    columns = min(each, WIDTH.value)
    constants = {
        "SLICE_ROWS": each // columns,
        "COLUMNS": columns,
        "PARTS": HELD // each,
    }
    return whole // each, constants


@triton.jit
def merge_latent(
    out, out_stride, lse, lse_stride, stops, share, partial, partial_lse, v_scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, IS_FIXED: tl.constexpr, PART_ROWS: tl.constexpr,
    SLICE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [T, GROUP, 512] of a 16-bit dtype, lse [T, GROUP] float32 or None; the other tensors as
    in `attend_latent`.

    Grid: items of all requests, slices of an item as from `merge_slices`. It may begin before
    `attend_latent` ends, and waits for its results.
    """
    ITEMS: tl.constexpr = (QUERIES * GROUP + TILE - 1) // TILE
    ACROSS: tl.constexpr = WIDTH // COLUMNS
    request = tl.program_id(0) // ITEMS
    item = tl.program_id(0) % ITEMS
    before = tl.load(stops + request)
    units = tl.load(stops + request + 1) - before
    begin = before * ITEMS + item * units
    first_part = begin
    last_part = begin + units - 1
    taken = 1
    if not IS_FIXED:
        # The line of a plan of one item a request
        begin = before
        taken = tl.load(share)
        first_part = before // taken
        last_part = (before + units - 1) // taken
    gdc_wait()
    if first_part < last_part:
        rows = tl.program_id(1) // ACROSS * SLICE_ROWS + tl.arange(0, SLICE_ROWS)
        columns = tl.program_id(1) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([SLICE_ROWS, COLUMNS], tl.float32)
        top = tl.full([SLICE_ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([SLICE_ROWS], tl.float32)
        for start in range(first_part, last_part + 1, PARTS):
            part = start + tl.arange(0, PARTS)
            is_part = part <= last_part
            # The item is the first that its program works on, or the last.
            place = part
            if not IS_FIXED:
                place = 2 * (part * ITEMS + item) + (begin > part * taken).to(tl.int32)
            row = place.to(tl.int64)[:, None] * PART_ROWS + rows[None, :]
            part_lse = tl.load(partial_lse + row, mask=is_part[:, None], other=-float("inf"))
            values = tl.load(
                partial + row[:, :, None] * WIDTH + columns[None, None, :],
                mask=is_part[:, None, None],
                other=0.0,
            )
            higher = tl.maximum(top, tl.max(part_lse, 0))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2(part_lse - base[None, :])
            kept_share = tl.exp2(top - base)
            mass = mass * kept_share + tl.sum(weights, 0)
            acc = acc * kept_share[:, None] + tl.sum(values * weights[:, :, None], 0)
            top = higher
        row = item * TILE + rows
        is_real = row < QUERIES * GROUP
        token = request * QUERIES + row // GROUP
        head = row % GROUP
        has_keys = mass > 0
        safe = tl.where(has_keys, mass, 1.0)
        places = token.to(tl.int64) * out_stride + head * WIDTH
        tl.store(
            out + places[:, None] + columns[None, :],
            (acc * (v_scale / safe)[:, None]).to(out.dtype.element_ty),
            mask=is_real[:, None],
        )
        if lse is not None:  # noqa: SIM102  # this one is the compiler's
            if tl.program_id(1) % ACROSS == 0:
                value = tl.where(has_keys, (top + tl.log2(safe)) * LN_2, -float("inf"))
                tl.store(lse + token.to(tl.int64) * lse_stride + head, value, mask=is_real)
