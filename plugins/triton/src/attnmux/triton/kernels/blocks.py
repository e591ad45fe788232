"""What every attention kernel shares: keys loaded block by block, and the running softmax.

Rows are queries of one KV head: row r of a tile is token r // GROUP and query head r % GROUP of its
group, so that few tokens of many heads fill a tile as well as many tokens do. Logits are kept in
units of log 2, for `exp2` is an instruction and `exp` is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    base,
    rows,
    row_stride,
    is_there,
    WIDTH: tl.constexpr,
    REAL_WIDTH: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """[len(rows), WIDTH]: rows of a matrix, 0 behind REAL_WIDTH and, where CHECKED, where there is
    none."""
    columns = tl.arange(0, WIDTH)
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
    """[len(wanted)]: the value at each wanted index, 0 where there is none. index: of values."""
    return tl.sum(tl.where(index[None, :] == wanted[:, None], values[None, :], 0), 1)


@triton.jit
def tile_of_queries(
    q,
    q_stride,
    q_head_stride,
    q_tail,
    q_tail_stride,
    q_tail_head_stride,
    first_row,
    num_queries,
    first_token,
    kv_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    REAL_D: tl.constexpr,
    TAIL: tl.constexpr,
    REAL_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_M rows of a request's queries from first_row on: whether each is real, its token among
    the request's and among the step's, its head, and Q in two parts.

    Rows behind the last are copies of it, so that they ask for no other keys.
    """
    row = first_row + tl.arange(0, BLOCK_M)
    is_real = row < num_queries * GROUP
    row = tl.minimum(row, num_queries * GROUP - 1)
    order = row // GROUP
    token = first_token + order
    head = kv_head * GROUP + row % GROUP
    tokens = token.to(tl.int64)
    heads = head.to(tl.int64)
    tile = load_rows(q, tokens * q_stride + heads * q_head_stride, 1, is_real, D, REAL_D, False)
    tail = tile
    if TAIL > 0:
        rows = tokens * q_tail_stride + heads * q_tail_head_stride
        tail = load_rows(q_tail, rows, 1, is_real, TAIL, REAL_TAIL, False)
    return is_real, order, token, head, tile, tail


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DV: tl.constexpr):
    """The running softmax before the first key: see `attend_blocks`."""
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
    """The first key that a query at `position` sees, and one past the last."""
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
def attend_blocks(
    acc,
    top,
    mass,
    q,
    q_tail,
    k_base,
    k_stride,
    k_tail_base,
    k_tail_stride,
    v_base,
    v_stride,
    keys_base,
    start,
    stop,
    num_keys,
    first,
    end,
    mask_rows,
    shared_end,
    item_start,
    scale,
    cap,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    REAL_D: tl.constexpr,
    TAIL: tl.constexpr,
    REAL_TAIL: tl.constexpr,
    DV: tl.constexpr,
    REAL_DV: tl.constexpr,
    PAGE: tl.constexpr,
    IS_LATENT: tl.constexpr,
    IN_CALL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the keys start <= j < stop to the running softmax; `start` is a multiple of BLOCK_N.

    acc [M, DV] float32, top and mass [M] float32: the sum of weighted values, the largest logit and
    the sum of weights. q [M, D] and q_tail [M, TAIL]: K's columns in two parts, each a power of 2.
    keys_base: the request's slots or, with PAGE above 1, its pages; IN_CALL its first row of K.
    first, end [M]: what each row sees; mask_rows [M]: where its key 0 is in the custom mask;
    shared_end, item_start [M]: what lies between is hidden. scale: times log2(e), unless HAS_CAP.
    HIDES: whether any of the rows may not see any of the keys; without it nothing is compared.
    """
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        keys = block + tl.arange(0, BLOCK_N)
        is_there = keys < num_keys
        if IN_CALL:
            slots = keys_base + keys
        elif PAGE == 1:
            if HIDES:
                slots = tl.load(keys_base + keys, mask=is_there, other=0)
            else:
                slots = tl.load(keys_base + keys)
        else:
            if HIDES:
                pages = tl.load(keys_base + keys // PAGE, mask=is_there, other=0)
            else:
                pages = tl.load(keys_base + keys // PAGE)
            slots = pages.to(tl.int64) * PAGE + keys % PAGE
        k = load_rows(k_base, slots, k_stride, is_there, D, REAL_D, HIDES).to(q.dtype)
        logits = tl.dot(q, tl.trans(k))
        if TAIL > 0:
            tail = load_rows(k_tail_base, slots, k_tail_stride, is_there, TAIL, REAL_TAIL, HIDES)
            logits = tl.dot(q_tail, tl.trans(tail.to(q.dtype)), logits)
        logits = logits * scale
        if HAS_CAP:
            # cap * tanh(logits / cap); beyond 2**100 the quotient is 1 to float32.
            grown = tl.exp2(tl.minimum(logits * (2.0 * LOG2_E / cap), 100.0))
            logits = (cap - 2.0 * cap / (grown + 1.0)) * LOG2_E
        if HIDES:
            sees = (keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None])
            if HAS_MASK:
                kept = tl.load(mask_rows[:, None] + keys[None, :], mask=sees, other=0)
                sees = sees & (kept != 0)
            if HAS_ITEMS:
                between = keys[None, :] >= shared_end[:, None]
                sees = sees & ~(between & (keys[None, :] < item_start[:, None]))
            logits = tl.where(sees, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        # A row that has seen nothing yet: the difference of two infinities is no number.
        base = tl.where(higher == -float("inf"), 0.0, higher) if HIDES else higher
        weights = tl.exp2(logits - base[:, None])
        kept_share = tl.exp2(top - base)
        mass = mass * kept_share + tl.sum(weights, 1)
        if IS_LATENT:
            v = k
        else:
            v = load_rows(v_base, slots, v_stride, is_there, DV, REAL_DV, HIDES).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * kept_share[:, None])
        top = higher
    return acc, top, mass


@triton.jit
def store_rows(
    out_base,
    out_stride,
    lse_base,
    lse_stride,
    sinks,
    acc,
    top,
    mass,
    token,
    head,
    is_real,
    v_scale,
    DV: tl.constexpr,
    REAL_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """The softmax's result of each row, to out [T, Hq, Dv] and lse [T, Hq]: 0 and -inf without
    keys."""
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        higher = tl.maximum(top, sink)
        # Neither keys nor a sink: the difference of two infinities is no number.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        kept_share = tl.exp2(top - base)
        mass = mass * kept_share + tl.exp2(sink - base)
        acc = acc * kept_share[:, None]
        top = higher
    has_keys = mass > 0
    mass = tl.where(has_keys, mass, 1.0)
    acc = acc * (v_scale / mass)[:, None]
    columns = tl.arange(0, DV)
    places = token.to(tl.int64) * out_stride + head * REAL_DV
    tl.store(
        out_base + places[:, None] + columns[None, :],
        acc.to(out_base.dtype.element_ty),
        mask=is_real[:, None] & (columns[None, :] < REAL_DV),
    )
    if HAS_LSE:
        lse = tl.where(has_keys, (top + tl.log2(mass)) * LN_2, -float("inf"))
        tl.store(lse_base + token.to(tl.int64) * lse_stride + head, lse, mask=is_real)
