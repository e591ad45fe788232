"""Shared by the portable attention kernels: keys loaded block by block, and the running softmax.

Rows are queries of one KV head: row r of a tile is token r // GROUP and query head r % GROUP of its
group, so that few tokens of many heads fill a tile as well as many tokens do. Logits are in units
of log 2, because `exp2` is an instruction and `exp` is not.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnmux.triton.kernels.four_bits import load_four_bits, real_columns

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Queries(NamedTuple):
    """Q in two parts: [T, Hq, REAL_D] and, if there is a tail, [T, Hq, REAL_TAIL]."""

    q: tl.tensor
    stride: tl.tensor
    head_stride: tl.tensor
    tail: tl.tensor
    tail_stride: tl.tensor
    tail_head_stride: tl.tensor


class Keys(NamedTuple):
    """K in two parts and V of one KV head: addresses, and how far rows are apart."""

    k: tl.tensor
    k_stride: tl.tensor
    tail: tl.tensor
    tail_stride: tl.tensor
    v: tl.tensor
    v_stride: tl.tensor
    k_scales: tl.tensor
    """The scales of K's blocks and of V's; read if FOUR_BITS. All strides then count words."""
    k_scales_stride: tl.tensor
    v_scales: tl.tensor
    v_scales_stride: tl.tensor
    base: tl.tensor
    """The request's slots or, with PAGE above 1, its pages; IN_CALL its first row of K."""


class Sight(NamedTuple):
    """Which keys each row sees, [M] each."""

    first: tl.tensor
    end: tl.tensor
    """One past the last."""
    mask_rows: tl.tensor
    """The place of the row's key 0 in the mask; read if HAS_MASK."""
    mask_start: tl.tensor
    """The first key that the mask covers; all before it are kept. A number."""
    shared_end: tl.tensor
    item_start: tl.tensor
    """Keys from shared_end to item_start are hidden if HAS_ITEMS."""
    position: tl.tensor
    slope: tl.tensor
    """The bias of a key for each place that it is after `position`, times log2(e); read if
    HAS_ALIBI."""
    biases: tl.tensor
    """The address of the bias of a key at `position`. The values of keys before and after it are on
    both sides; read if REACH is not below 0."""


class Widths(NamedTuple):
    """Columns of tiles, powers of 2, and the layer's own number of columns of each, REAL_."""

    D: tl.constexpr
    REAL_D: tl.constexpr
    TAIL: tl.constexpr
    REAL_TAIL: tl.constexpr
    DV: tl.constexpr
    REAL_DV: tl.constexpr


@triton.jit
def load_rows(
    base,
    rows,
    row_stride,
    is_there,
    WIDTH: tl.constexpr,
    REAL_WIDTH: tl.constexpr,
    CHECKED: tl.constexpr,
    FOUR_BITS: tl.constexpr = False,
):
    """[N, WIDTH] of base's dtype: rows [N] of a matrix, with 0 from column REAL_WIDTH on and, if
    CHECKED, where is_there [N] is False. FOUR_BITS: in the order of `real_columns`."""
    columns = real_columns(WIDTH) if FOUR_BITS else tl.arange(0, WIDTH)
    places = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    if WIDTH != REAL_WIDTH:
        within = columns[None, :] < REAL_WIDTH
        if CHECKED:
            within = within & is_there[:, None]
        return tl.load(places, mask=within, other=0.0)
    if CHECKED:
        return tl.load(places, mask=is_there[:, None], other=0.0)
    return tl.load(places)


@triton.jit
def take(values, index, wanted):
    """[M]: the value at each index of wanted [M], 0 where there is none. values [N] are at index
    [N]."""
    return tl.sum(tl.where(index[None, :] == wanted[:, None], values[None, :], 0), 1)


@triton.jit
def tile_of_queries(
    queries,
    first_row,
    num_queries,
    first_token,
    kv_head,
    GROUP: tl.constexpr,
    widths,
    BLOCK_M: tl.constexpr,
    FOUR_BITS: tl.constexpr,
):
    """BLOCK_M rows of a request's queries from first_row on, [BLOCK_M] each: whether a row is real,
    its token among the request's, its token among the step's, its head; and Q in two parts,
    [BLOCK_M, D] and [BLOCK_M, TAIL].

    Rows after the last are copies of it, so that they need no other keys. FOUR_BITS: columns are in
    the order that those of K have.
    """
    row = first_row + tl.arange(0, BLOCK_M)
    is_real = row < num_queries * GROUP
    row = tl.minimum(row, num_queries * GROUP - 1)
    order = row // GROUP
    token = first_token + order
    head = kv_head * GROUP + row % GROUP
    tokens = token.to(tl.int64)
    heads = head.to(tl.int64)
    rows = tokens * queries.stride + heads * queries.head_stride
    tile = load_rows(queries.q, rows, 1, is_real, widths.D, widths.REAL_D, False, FOUR_BITS)
    tail = tile
    if widths.TAIL > 0:
        rows = tokens * queries.tail_stride + heads * queries.tail_head_stride
        tail = load_rows(
            queries.tail, rows, 1, is_real, widths.TAIL, widths.REAL_TAIL, False, FOUR_BITS
        )
    return is_real, order, token, head, tile, tail


@triton.jit
def as_halves(tile, tail, HAS_TAIL: tl.constexpr):
    """Rows of Q in float16, and their factors [M] float32: the row is factor times the result.

    For keys of 8 or 4 bits, whose conversion to float16 is an instruction and to bfloat16 several.
    The largest value of a row is then between 1 and 2, so that rows of any size fit.
    """
    top = tl.max(tl.abs(tile.to(tl.float32)), 1)
    if HAS_TAIL:
        top = tl.maximum(top, tl.max(tl.abs(tail.to(tl.float32)), 1))
    factor = tl.where(top > 0, tl.exp2(tl.floor(tl.log2(top))), 1.0)
    tile = (tile.to(tl.float32) / factor[:, None]).to(tl.float16)
    if HAS_TAIL:
        tail = (tail.to(tl.float32) / factor[:, None]).to(tl.float16)
    return tile, tail, factor


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DV: tl.constexpr):
    """The running softmax before the first key, as in `attend_blocks`."""
    acc = tl.zeros([ROWS, DV], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    return acc, top, tl.zeros([ROWS], tl.float32)


@triton.jit
def visible_range(
    position,
    num_keys,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first key that a query at `position` sees, and one past the last; of position's shape."""
    first = position * 0
    end = first + num_keys
    if IS_CAUSAL:
        end = tl.minimum(end, position + 1)
    if WINDOW >= 0:
        first = tl.maximum(position - WINDOW, 0)
    if CHUNK > 0:
        chunk_start = position // CHUNK * CHUNK
        first = tl.maximum(first, chunk_start)
        end = tl.minimum(end, chunk_start + CHUNK)
    return first, end


@triton.jit
def slopes_of(alibi_slopes, head, HAS_ALIBI: tl.constexpr):
    """The slope of each row of head [M], as `Sight.slope`; zeros without ALiBi."""
    slope = tl.zeros(head.shape, tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + head) * LOG2_E
    return slope


@triton.jit
def biases_of(relative_bias, head, position, REACH: tl.constexpr, AHEAD: tl.constexpr):
    """`Sight.biases` of rows of head [M], in a table [Hq, REACH + 1 + AHEAD]; position, which is
    not read, without one."""
    if REACH >= 0:
        biases = relative_bias + head * (REACH + 1 + AHEAD) + REACH
    else:
        biases = position
    return biases


@triton.jit
def part_of_range(low, high, part, num_parts, LEAST: tl.constexpr):
    """The part-th of num_parts parts of low <= i < high: its first, and one past its last.

    A part has at least LEAST, so that the last ones may have none.
    """
    each = tl.maximum((high - low + num_parts - 1) // num_parts, LEAST)
    start = tl.minimum(low + part * each, high)
    return start, tl.minimum(start + each, high)


@triton.jit
def weigh(logits, top, mass, HIDES: tl.constexpr):
    """The weights [M, N] of a block's logits, the share [M] that earlier results keep, and the new
    top and mass [M], as in `attend_blocks`. HIDES: whether a row may have seen no key yet."""
    higher = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen no key yet: inf - inf is NaN.
    base = tl.where(higher == -float("inf"), 0.0, higher) if HIDES else higher
    weights = tl.exp2(logits - base[:, None])
    kept_share = tl.exp2(top - base)
    return weights, kept_share, higher, mass * kept_share + tl.sum(weights, 1)


@triton.jit
def attend_blocks(
    acc, top, mass, q, q_tail, all_keys, start, stop, num_keys, sight, scale, cap, widths,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, IS_LATENT: tl.constexpr, IN_CALL: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ITEMS: tl.constexpr, HIDES: tl.constexpr,
    HAS_ALIBI: tl.constexpr, REACH: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    FOUR_BITS: tl.constexpr,
):  # fmt: skip
    """Add the keys start <= j < stop to the running softmax; `start` is a multiple of BLOCK_N.

    acc [M, DV] float32, top and mass [M] float32: the sum of weighted values, the largest logit and
    the sum of weights. q [M, D] and q_tail [M, TAIL], of Q's dtype. all_keys: `Keys`. sight:
    `Sight`. scale: a number or [M, 1], times log2(e), unless HAS_CAP. HAS_ALIBI: without a
    cap. REACH, AHEAD: how far before and after a row's position keys have biases of their own;
    REACH below 0 without any. HIDES: whether any row may not see some of the keys; without it
    nothing is compared.
    """
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        keys = block + tl.arange(0, BLOCK_N)
        is_there = keys < num_keys
        if IN_CALL:
            slots = all_keys.base + keys
        elif PAGE == 1:
            if HIDES:
                slots = tl.load(all_keys.base + keys, mask=is_there, other=0)
            else:
                slots = tl.load(all_keys.base + keys)
        else:
            if HIDES:
                pages = tl.load(all_keys.base + keys // PAGE, mask=is_there, other=0)
            else:
                pages = tl.load(all_keys.base + keys // PAGE)
            slots = pages.to(tl.int64) * PAGE + keys % PAGE
        if FOUR_BITS:
            k = load_four_bits(
                all_keys.k, all_keys.k_stride, all_keys.k_scales, all_keys.k_scales_stride, slots,
                is_there, widths.D, widths.REAL_D, 0, HIDES, FOUR_BITS,
            )  # fmt: skip
        else:
            k = load_rows(
                all_keys.k, slots, all_keys.k_stride, is_there, widths.D, widths.REAL_D, HIDES
            ).to(q.dtype)
        logits = tl.dot(q, tl.trans(k))
        if widths.TAIL > 0:
            if FOUR_BITS:
                tail = load_four_bits(
                    all_keys.tail, all_keys.tail_stride, all_keys.k_scales,
                    all_keys.k_scales_stride, slots, is_there, widths.TAIL, widths.REAL_TAIL,
                    widths.REAL_D, HIDES, FOUR_BITS,
                )  # fmt: skip
            else:
                tail = load_rows(
                    all_keys.tail, slots, all_keys.tail_stride, is_there, widths.TAIL,
                    widths.REAL_TAIL, HIDES,
                )  # fmt: skip
            logits = tl.dot(q_tail, tl.trans(tail.to(q.dtype)), logits)
        logits = logits * scale
        if HAS_CAP:
            # cap * tanh(logits / cap); beyond 2**100 the quotient is 1 to float32.
            grown = tl.exp2(tl.minimum(logits * (2.0 * LOG2_E / cap), 100.0))
            logits = (cap - 2.0 * cap / (grown + 1.0)) * LOG2_E
        if HAS_ALIBI:
            distance = (keys[None, :] - sight.position[:, None]).to(tl.float32)
            logits += sight.slope[:, None] * distance
        if REACH >= 0:
            place = keys[None, :] - sight.position[:, None]
            place = tl.minimum(tl.maximum(place, -REACH), AHEAD)
            logits += tl.load(sight.biases[:, None] + place) * LOG2_E
        if HIDES:
            sees = (keys[None, :] >= sight.first[:, None]) & (keys[None, :] < sight.end[:, None])
            if HAS_MASK:
                is_masked = sees & (keys >= sight.mask_start)[None, :]
                kept = tl.load(sight.mask_rows[:, None] + keys[None, :], mask=is_masked, other=1)
                sees = sees & (kept != 0)
            if HAS_ITEMS:
                between = keys[None, :] >= sight.shared_end[:, None]
                sees = sees & ~(between & (keys[None, :] < sight.item_start[:, None]))
            logits = tl.where(sees, logits, -float("inf"))
        weights, kept_share, top, mass = weigh(logits, top, mass, HIDES)
        if IS_LATENT:
            v = k
        elif FOUR_BITS:
            v = load_four_bits(
                all_keys.v, all_keys.v_stride, all_keys.v_scales, all_keys.v_scales_stride, slots,
                is_there, widths.DV, widths.REAL_DV, 0, HIDES, FOUR_BITS,
            )  # fmt: skip
        else:
            v = load_rows(
                all_keys.v, slots, all_keys.v_stride, is_there, widths.DV, widths.REAL_DV, HIDES
            ).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * kept_share[:, None])
    return acc, top, mass


@triton.jit
def store_rows(
    out_base, out_stride, lse_base, lse_stride,
    sinks, acc, top, mass, token, head, is_real, v_scale,
    DV: tl.constexpr, REAL_DV: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    FOUR_BITS: tl.constexpr = False,
):  # fmt: skip
    """Store each row's result to out [T, Hq, Dv] and lse [T, Hq]: 0 and -inf without keys.

    acc [M, DV], top and mass [M] as in `attend_blocks`; token, head and is_real [M]. FOUR_BITS:
    acc's columns are in the order of `real_columns`.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        higher = tl.maximum(top, sink)
        # Neither keys nor a sink: inf - inf is NaN.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        kept_share = tl.exp2(top - base)
        mass = mass * kept_share + tl.exp2(sink - base)
        acc = acc * kept_share[:, None]
        top = higher
    has_keys = mass > 0
    mass = tl.where(has_keys, mass, 1.0)
    acc = acc * (v_scale / mass)[:, None]
    columns = real_columns(DV) if FOUR_BITS else tl.arange(0, DV)
    places = token.to(tl.int64) * out_stride + head * REAL_DV
    tl.store(
        out_base + places[:, None] + columns[None, :],
        acc.to(out_base.dtype.element_ty),
        mask=is_real[:, None] & (columns[None, :] < REAL_DV),
    )
    if HAS_LSE:
        lse = tl.where(has_keys, (top + tl.log2(mass)) * LN_2, -float("inf"))
        tl.store(lse_base + token.to(tl.int64) * lse_stride + head, lse, mask=is_real)
