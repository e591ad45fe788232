"""Linear layers in chunks of 64 tokens, for prompts: the products of all chunks at once.

With G the running sum of g within a chunk, S the state before it, and a decay for each head:

    (I + diag(beta) L) [W U] = diag(beta) [exp(G) K, V]     L_ij = exp(G_i - G_j) k_i . k_j, j < i
    N = U - W S                                             new values; beta V without delta rule
    S' = exp(G_last) S + (exp(G_last - G) K)^T N
    O = scaling * (exp(G) Q S + M N)                        M_ij = exp(G_i - G_j) q_i . k_j, j <= i

`solve_chunks` makes W and U, `pass_states` (in `chunk_states`) goes from chunk to chunk and keeps
each chunk's S and N, and `chunk_outputs` makes O. Source: Yang et al., Gated Delta Networks,
arXiv:2412.06464, section 3.3.

`chunk_first`, `chunk_count` [N] int32: first token and number of tokens of each chunk. G is summed
from g cut off at -20, where exp is 2e-9: longer sums would have no digits left for later tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.linear.tokens import normed

LEAST = tl.constexpr(-20.0)


@triton.jit
def chunk_of(chunk, chunk_first, chunk_count, place):
    """A chunk's first token, and which places have a token. Places count from the first token in 32
    bits, which take half the registers of 64."""
    first = tl.load(chunk_first + chunk).to(tl.int64)
    return first, place < tl.load(chunk_count + chunk)


@triton.jit
def running_decay(g, place, is_token, HV: tl.constexpr):
    """G [T] of a chunk and head, whose first g is given. A place without a token adds nothing."""
    decay = tl.load(g + place * HV, mask=is_token, other=0.0)
    return tl.cumsum(tl.maximum(decay, LEAST), axis=0)


@triton.jit
def between(decay, is_kept):
    """exp(G_i - G_j) [T, T] where is_kept, 0 elsewhere."""
    return tl.exp(tl.where(is_kept, decay[:, None] - decay[None, :], -float("inf")))


@triton.jit
def load_rows(x, stride, place, is_token, column, D: tl.constexpr):
    """[T, columns] of a chunk and head, whose first row x is, and the others `stride` apart."""
    return tl.load(
        x + place[:, None] * stride + column[None, :],
        mask=is_token[:, None] & (column < D)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(x, rows, stride, place, is_token, column, D: tl.constexpr):
    """Writes `rows` [T, columns] where `load_rows` reads them."""
    tl.store(
        x + place[:, None] * stride + column[None, :],
        rows.to(x.dtype.element_ty),
        mask=is_token[:, None] & (column < D)[None, :],
    )


@triton.jit
def joined_in_pairs(inverse, met, row, column, level, kind: tl.constexpr, PRECISION: tl.constexpr):
    """M of blocks of 2 ** (level + 2) rows, from that of blocks of half as many."""
    joined = (row >> (level + 2)) == (column >> (level + 2))
    joined &= (row >> (level + 1)) != (column >> (level + 1))
    part = tl.where(joined, met, 0.0).to(kind)
    factor = inverse.to(kind)
    part = tl.dot(factor, part, input_precision=PRECISION).to(kind)
    return inverse - tl.dot(part, factor, input_precision=PRECISION)


@triton.jit
def inverted(met, place, IS_BOUNDED: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + met, for met [64, 64] below the diagonal. place: 0 to 63.

    It grows from blocks of 1 to blocks of 64: with M the inverse of the diagonal blocks of s rows
    and A the part that joins them in pairs, that of blocks of 2 s is M - M A M.

    IS_BOUNDED: keys are unit vectors, and the inverse will be rounded to 16 bits. An element of it
    is then at most beta, which is 2 at most: product by product, keys are turned and shortened. So
    float16 holds all, in as many digits as TF32 has, and is multiplied twice as fast.
    """
    row, column = place[:, None], place[None, :]
    joined = (row // 2 == column // 2) & (row != column)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(joined, met, 0.0)
    if PRECISION == "ieee" and not IS_BOUNDED:
        # Unrolled, ten products without tensor cores compile for half a minute, and spill
        for level in range(5):
            inverse = joined_in_pairs(inverse, met, row, column, level, tl.float32, PRECISION)
    else:
        kind: tl.constexpr = tl.float16 if IS_BOUNDED else tl.float32
        for level in tl.static_range(5):
            inverse = joined_in_pairs(inverse, met, row, column, level, kind, PRECISION)
    return inverse


@triton.jit
def store_solved(
    inverse, grown, rate, w, v, v_stride, u, place, is_token,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W and U of a chunk and head: inverse [T, T] times beta exp(G) K and beta V, with beta `rate`
    [T] and exp(G) K `grown` [T, K] float32. w, v, u: the first row of each."""
    kind = u.dtype.element_ty
    grown = tl.dot(inverse, (grown * rate[:, None]).to(kind), input_precision=PRECISION)
    store_rows(w, grown, HV * K, place, is_token, tl.arange(0, BLOCK_K), K)
    for start in tl.static_range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        values = load_rows(v, v_stride, place, is_token, column, V)
        values = (values.to(tl.float32) * rate[:, None]).to(kind)
        values = tl.dot(inverse, values, input_precision=PRECISION)
        store_rows(u, values, HV * V, place, is_token, column, V)


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
    first, is_token = chunk_of(chunk, chunk_first, chunk_count, place)
    row = first * HV + head
    key_head = head // GROUP
    channel = tl.arange(0, BLOCK_K)
    keys = load_rows(k + first * k_stride + key_head * K, k_stride, place, is_token, channel, K)
    kind = keys.dtype
    if NORMED:
        keys = normed(keys.to(tl.float32)).to(kind)
    decay = running_decay(g + row, place, is_token, HV)
    end = tl.min(decay, axis=0)
    kept = keys.to(tl.float32) * tl.exp(end - decay)[:, None]
    store_rows(left + row * K, kept, HV * K, place, is_token, channel, K)
    tl.store(last + chunk * HV + head, end)
    rate = tl.load(beta + row + place * HV, mask=is_token, other=0.0).to(tl.float32)
    met = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    met *= between(decay, place[:, None] > place[None, :]) * rate[:, None]
    is_bounded: tl.constexpr = NORMED and kind != tl.float32
    inverse = inverted(met, place, is_bounded, PRECISION).to(kind)
    store_solved(
        inverse, keys.to(tl.float32) * tl.exp(decay)[:, None], rate, w + row * K,
        v + first * v_stride + head * V, v_stride, u + row * V, place, is_token,
        HV, K, V, BLOCK_K, BLOCK_V, PRECISION,
    )  # fmt: skip


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
    first, is_token = chunk_of(chunk, chunk_first, chunk_count, place)
    row = first * HV + head
    key_head = head // GROUP
    queries = load_rows(q + first * q_stride + key_head * K, q_stride, place, is_token, channel, K)
    keys = load_rows(k + first * k_stride + key_head * K, k_stride, place, is_token, channel, K)
    kind = keys.dtype
    if NORMED:
        queries = normed(queries.to(tl.float32)).to(kind)
        keys = normed(keys.to(tl.float32)).to(kind)
    decay = running_decay(g + row, place, is_token, HV)
    state = load_state(kept, chunk, head, channel, column, HV, K, V)
    result = tl.dot(queries, state, input_precision=PRECISION) * tl.exp(decay)[:, None]
    met = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    met *= between(decay, place[:, None] >= place[None, :])
    added = load_rows(new + row * V, HV * V, place, is_token, column, V)
    result += tl.dot(met.to(kind), added, input_precision=PRECISION)
    store_rows(out + row * V, result * scaling, HV * V, place, is_token, column, V)


@triton.jit
def load_state(
    kept, chunk, head, channel, column, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):
    """[channels, columns] of the state before a chunk; kept [N, Hv, K, V]."""
    return tl.load(
        kept + (chunk.to(tl.int64) * HV + head) * (K * V) + channel[:, None] * V + column[None, :],
        mask=(channel < K)[:, None] & (column < V)[None, :],
        other=0.0,
    )
