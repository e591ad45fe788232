"""Linear layers in chunks of 64 tokens, for prompts: three kernels of matrix products.

With G the running sum of g within a chunk, S the state before it, and a decay for each head:

    (I + diag(beta) L) [W U] = diag(beta) [exp(G) K, V]     L_ij = exp(G_i - G_j) k_i . k_j, j < i
    N = U - W S                                             new values; beta V without delta rule
    S' = exp(G_last) S + (exp(G_last - G) K)^T N
    O = scaling * (exp(G) Q S + M N)                        M_ij = exp(G_i - G_j) q_i . k_j, j <= i

`solve_chunks` makes W and U of all chunks at once, `pass_states` goes from chunk to chunk and keeps
each chunk's S and N, and `chunk_outputs` makes O of all chunks at once. Source: Yang et al., Gated
Delta Networks, arXiv:2412.06464, section 3.3.

`chunk_first`, `chunk_count` [N] int32: first token and number of tokens of each chunk. G is summed
from g cut off at -20, where exp is 2e-9: longer sums would have no digits left for what follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.linear import normed

LEAST = tl.constexpr(-20.0)


@triton.jit
def running_decay(g, token, is_token, head, HV: tl.constexpr):
    """G [T] of a chunk. A place without a token adds nothing."""
    decay = tl.load(g + token * HV + head, mask=is_token, other=0.0)
    return tl.cumsum(tl.maximum(decay, LEAST), axis=0)


@triton.jit
def between(decay, is_kept):
    """exp(G_i - G_j) [T, T] where is_kept, 0 elsewhere."""
    return tl.exp(tl.where(is_kept, decay[:, None] - decay[None, :], -float("inf")))


@triton.jit
def load_rows(x, stride, token, is_token, head, column, D: tl.constexpr):
    """[T, columns] of a head: x [tokens, heads, D], whose tokens are `stride` apart."""
    return tl.load(
        x + token[:, None] * stride + head * D + column[None, :],
        mask=is_token[:, None] & (column < D)[None, :],
        other=0.0,
    )


@triton.jit
def joined_in_pairs(inverse, met, row, column, level, PRECISION: tl.constexpr):
    """M of blocks of 2 ** (level + 2) rows, from that of blocks of half as many."""
    joined = (row >> (level + 2)) == (column >> (level + 2))
    joined &= (row >> (level + 1)) != (column >> (level + 1))
    part = tl.where(joined, met, 0.0)
    part = tl.dot(inverse, part, input_precision=PRECISION)
    return inverse - tl.dot(part, inverse, input_precision=PRECISION)


@triton.jit
def inverted(met, place, PRECISION: tl.constexpr):
    """The inverse of I + met, for met [64, 64] below the diagonal. place: 0 to 63.

    It grows from blocks of 1 to blocks of 64: with M the inverse of the diagonal blocks of s rows
    and A the part that joins them in pairs, that of blocks of 2 s is M - M A M.
    """
    row, column = place[:, None], place[None, :]
    joined = (row // 2 == column // 2) & (row != column)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(joined, met, 0.0)
    if PRECISION == "ieee":
        # Unrolled, ten products without tensor cores compile for half a minute, and spill
        for level in range(5):
            inverse = joined_in_pairs(inverse, met, row, column, level, PRECISION)
    else:
        for level in tl.static_range(5):
            inverse = joined_in_pairs(inverse, met, row, column, level, PRECISION)
    return inverse


@triton.jit
def store_new_values(
    inverse, v, v_stride, rate, u, token, is_token, head,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U [T, Hv, V] of a chunk and head: inverse [T, T] times beta V, with beta `rate` [T]."""
    kind = u.dtype.element_ty
    for start in tl.static_range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        values = load_rows(v, v_stride, token, is_token, head, column, V)
        values = (values.to(tl.float32) * rate[:, None]).to(kind)
        tl.store(
            u + (token * HV + head)[:, None] * V + column[None, :],
            tl.dot(inverse, values, input_precision=PRECISION).to(kind),
            mask=is_token[:, None] & (column < V)[None, :],
        )


@triton.jit
def solve_chunks(
    k, k_stride, v, v_stride, g, beta, w, u, left, last, chunk_first, chunk_count,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W [T, Hv, K] and U [T, Hv, V] of a chunk and head. Grid (N, Hv). Also what `pass_states` can
    read sooner than make: `left` [T, Hv, K], exp(G_last - G) K, and `last` [N, Hv] float32, G_last.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK_T)
    is_token = place < tl.load(chunk_count + chunk)
    token = (tl.load(chunk_first + chunk) + place).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    keys = load_rows(k, k_stride, token, is_token, head // GROUP, channel, K)
    kind = keys.dtype
    if NORMED:
        keys = normed(keys.to(tl.float32)).to(kind)
    decay = running_decay(g, token, is_token, head, HV)
    rate = tl.load(beta + token * HV + head, mask=is_token, other=0.0).to(tl.float32)
    met = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    met *= between(decay, place[:, None] > place[None, :]) * rate[:, None]
    inverse = inverted(met, place, PRECISION).to(kind)
    grown = (keys.to(tl.float32) * (rate * tl.exp(decay))[:, None]).to(kind)
    place_w = w + (token * HV + head)[:, None] * K + channel[None, :]
    is_there = is_token[:, None] & (channel < K)[None, :]
    solved = tl.dot(inverse, grown, input_precision=PRECISION)
    tl.store(place_w, solved.to(kind), mask=is_there)
    end = tl.min(decay, axis=0)
    tl.store(last + chunk * HV + head, end)
    kept = (keys.to(tl.float32) * tl.exp(end - decay)[:, None]).to(kind)
    tl.store(left + (token * HV + head)[:, None] * K + channel[None, :], kept, mask=is_there)
    store_new_values(
        inverse, v, v_stride, rate, u, token, is_token, head, HV, V, BLOCK_V, PRECISION
    )


@triton.jit
def pass_states(
    k, k_stride, v, v_stride, g, beta, w, left, last, new, kept, states, rows, known,
    chunk_indptr, chunk_first, chunk_count,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_DELTA_RULE: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S before each chunk, `kept` [N, Hv, K, V], and its N, `new` [T, Hv, V], which holds U first
    where there is a delta rule. Writes the states. chunk_indptr [B + 1] int32: each request's
    first chunk. `last` [N, Hv], or [N, Hv, K] with a decay for each channel. Grid (blocks of V, Hv,
    B).
    """
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    request = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_T)
    is_there = (channel < K)[:, None] & (column < V)[None, :]
    row = tl.load(rows + request)
    within = channel[:, None] * V + column[None, :]
    places = states + (row * HV + head) * (K * V) + within
    is_known = tl.load(known + request) != 0
    state = tl.load(places, mask=is_there & is_known, other=0.0).to(tl.float32)
    kind = kept.dtype.element_ty
    first_chunk = tl.load(chunk_indptr + request)
    for rank in range(tl.load(chunk_indptr + request + 1) - first_chunk):
        chunk = first_chunk + rank
        before = state.to(kind)
        tl.store(kept + (chunk.to(tl.int64) * HV + head) * (K * V) + within, before, mask=is_there)
        is_token = place < tl.load(chunk_count + chunk)
        token = (tl.load(chunk_first + chunk) + place).to(tl.int64)
        of_new = (token * HV + head)[:, None] * V + column[None, :]
        is_new = is_token[:, None] & (column < V)[None, :]
        if HAS_DELTA_RULE:
            added = tl.load(new + of_new, mask=is_new, other=0.0).to(tl.float32)
            known_keys = load_rows(w, HV * K, token, is_token, head, channel, K)
            added -= tl.dot(known_keys, before, input_precision=PRECISION)
            keys = load_rows(left, HV * K, token, is_token, head, channel, K)
            if BY_CHANNEL:
                of_last = (chunk * HV + head) * K + channel
                end = tl.load(last + of_last, mask=channel < K, other=0.0)[:, None]
            else:
                end = tl.load(last + chunk * HV + head)
        else:
            decay = running_decay(g, token, is_token, head, HV)
            end = tl.min(decay, axis=0)
            keys = load_rows(k, k_stride, token, is_token, head // GROUP, channel, K)
            keys = keys.to(tl.float32)
            if NORMED:
                keys = normed(keys)
            keys = (keys * tl.exp(end - decay)[:, None]).to(kind)
            added = load_rows(v, v_stride, token, is_token, head, column, V).to(tl.float32)
            if HAS_BETA:
                rate = tl.load(beta + token * HV + head, mask=is_token, other=0.0)
                added *= rate.to(tl.float32)[:, None]
        added = added.to(kind)
        tl.store(new + of_new, added, mask=is_new)
        state = state * tl.exp(end) + tl.dot(tl.trans(keys), added, input_precision=PRECISION)
    tl.store(places, state.to(states.dtype.element_ty), mask=is_there)


@triton.jit
def chunk_outputs(
    q, q_stride, k, k_stride, g, new, kept, out, chunk_first, chunk_count, scaling,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O of a chunk and head's block of columns. Grid (blocks of V, Hv, N)."""
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_T)
    is_token = place < tl.load(chunk_count + chunk)
    token = (tl.load(chunk_first + chunk) + place).to(tl.int64)
    queries = load_rows(q, q_stride, token, is_token, head // GROUP, channel, K)
    keys = load_rows(k, k_stride, token, is_token, head // GROUP, channel, K)
    kind = keys.dtype
    if NORMED:
        queries = normed(queries.to(tl.float32)).to(kind)
        keys = normed(keys.to(tl.float32)).to(kind)
    decay = running_decay(g, token, is_token, head, HV)
    state = tl.load(
        kept + (chunk.to(tl.int64) * HV + head) * (K * V)
        + channel[:, None] * V + column[None, :],
        mask=(channel < K)[:, None] & (column < V)[None, :],
        other=0.0,
    )  # fmt: skip
    result = tl.dot(queries, state, input_precision=PRECISION) * tl.exp(decay)[:, None]
    met = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    met *= between(decay, place[:, None] >= place[None, :])
    added = load_rows(new, HV * V, token, is_token, head, column, V)
    result += tl.dot(met.to(kind), added, input_precision=PRECISION)
    tl.store(
        out + (token * HV + head)[:, None] * V + column[None, :],
        (result * scaling).to(kind),
        mask=is_token[:, None] & (column < V)[None, :],
    )
