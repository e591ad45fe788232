"""Linear layers with a decay for each channel (Kimi's delta rule) in chunks of 64 tokens.

As in `chunks`, with G [T, K] the running sum of g in a chunk:

    (I + diag(beta) L) [W U] = diag(beta) [exp(G) K, V]     L_ij = k_i . exp(G_i - G_j) k_j, j < i
    N = U - W S
    S' = exp(G_last) S + (exp(G_last - G) K)^T N
    O = scaling * ((exp(G) Q) S + M N)                      M_ij = q_i . exp(G_i - G_j) k_j, j <= i

L and M are no products of two matrices of bounded numbers, as exp(-G) has no bound. So a chunk is
cut in halves again and again, down to NEAR rows. Rows of a second half meet those of the first by
way of the place between the halves, P: both of G_i - G_P and G_P - G_j are sums of g, at most 0.
One product serves all halves of a length. Rows of one NEAR meet by way of a place in their middle,
up to which sums of g have exponentials that float32 holds. Source: Kimi Linear, arXiv:2510.26692,
section 3; Yang et al., Gated Linear Attention, arXiv:2312.06635, section 4.3.

`weigh_channel_chunks` makes M, L and all that depends on G alone, `solve_channel_chunks` W and U,
`pass_states` goes from chunk to chunk, and `channel_outputs` makes O.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.linear.chunks import (
    LEAST,
    chunk_of,
    inverted,
    load_rows,
    load_state,
    store_rows,
    store_solved,
)
from attnmux.triton.kernels.linear.tokens import over_lengths

NEAR = tl.constexpr(8)
"""Up to half as many rows are away from the middle, so that sums of g, cut off at -20, are at least
-80. exp(80) is 5e34."""
HALVINGS = tl.constexpr(3)
"""Halvings of a chunk of 64 rows, down to NEAR."""


@triton.jit
def unit_of(x, stride, place, is_token, channel, D: tl.constexpr, NORMED: tl.constexpr):
    """[T]: the factors that make unit vectors of a chunk's Q or K, whose first row x is; or 1."""
    factor = tl.full(place.shape, 1.0, tl.float32)
    if NORMED:
        rows = load_rows(x, stride, place, is_token, channel, D).to(tl.float32)
        factor = over_lengths(rows)
    return factor


@triton.jit
def running_decays(g, place, is_token, channel, HV: tl.constexpr, K: tl.constexpr):
    """G [T, channels] of a chunk and head, whose first row g is. A place without a token adds
    nothing."""
    decays = load_rows(g, HV * K, place, is_token, channel, K)
    return tl.cumsum(tl.maximum(decays, LEAST), axis=0)


@triton.jit
def since(within, place, span, middle):
    """G_i - G_P [T, channels], for P the row `middle` of each `span` rows."""
    row = tl.broadcast_to((place // span * span + middle)[:, None], within.shape)
    return within - tl.gather(within, row, 0)


@triton.jit
def met_by(
    queries, keys, within, place, of_queries, of_keys, kind: tl.constexpr, PRECISION: tl.constexpr
):
    """of_queries, of_keys [T, T] and the sums over channels of x_i exp(G_i - G_j) k_j for j <= i,
    with x of queries, and of keys.

    queries, keys, within (G) [T, channels] float32. Values above the diagonal have no meaning, and
    may be no numbers.
    """
    reached = since(within, place, NEAR, NEAR // 2 - 1)
    others = tl.trans(keys * tl.exp(-reached))
    factor = tl.exp(reached)
    is_near = place[:, None] // NEAR == place[None, :] // NEAR
    found = tl.dot(queries * factor, others, input_precision=PRECISION)
    of_queries += tl.where(is_near, found, 0.0)
    found = tl.dot(keys * factor, others, input_precision=PRECISION)
    of_keys += tl.where(is_near, found, 0.0)
    for halving in tl.range(HALVINGS, num_stages=1):
        half = NEAR << halving
        reached = since(within, place, 2 * half, half - 1)
        is_second = (place // half % 2 == 1)[:, None]
        # Apart from rounding, at most 0
        factor = tl.exp(tl.minimum(tl.where(is_second, reached, -reached), 0.0))
        reached_keys = keys * factor
        earlier = tl.trans(tl.where(is_second, 0.0, reached_keys).to(kind))
        is_pair = place[:, None] // (2 * half) == place[None, :] // (2 * half)
        later = tl.where(is_second, queries * factor, 0.0).to(kind)
        found = tl.dot(later, earlier, input_precision=PRECISION)
        of_queries += tl.where(is_pair, found, 0.0)
        later = tl.where(is_second, reached_keys, 0.0).to(kind)
        found = tl.dot(later, earlier, input_precision=PRECISION)
        of_keys += tl.where(is_pair, found, 0.0)
    return of_queries, of_keys


@triton.jit
def weigh_channel_chunks(
    q, q_stride, k, k_stride, g, seen, met, asked, grown, left, last, chunk_first, chunk_count,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the matrices of a chunk and head: M, `seen`, and L, `met`, both [T, Hv, BLOCK_T];
    exp(G) Q, `asked`, exp(G) K, `grown`, and exp(G_last - G) K, `left`, all [T, Hv, K]; and G_last,
    `last` [N, Hv, K] float32. Channels go by in blocks of BLOCK_C. Grid (N, Hv).
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK_T)
    first, is_token = chunk_of(chunk, chunk_first, chunk_count, place)
    row = first * HV + head
    q += first * q_stride + head // GROUP * K
    k += first * k_stride + head // GROUP * K
    every = tl.arange(0, BLOCK_K)
    unit_q = unit_of(q, q_stride, place, is_token, every, K, NORMED)
    unit_k = unit_of(k, k_stride, place, is_token, every, K, NORMED)
    of_queries = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    of_keys = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for start in tl.range(0, K, BLOCK_C, num_stages=1):
        channel = start + tl.arange(0, BLOCK_C)
        queries = load_rows(q, q_stride, place, is_token, channel, K).to(tl.float32)
        queries *= unit_q[:, None]
        keys = load_rows(k, k_stride, place, is_token, channel, K).to(tl.float32)
        keys *= unit_k[:, None]
        within = running_decays(g + row * K, place, is_token, channel, HV, K)
        of_queries, of_keys = met_by(
            queries, keys, within, place, of_queries, of_keys, asked.dtype.element_ty, PRECISION
        )
        end = tl.min(within, axis=0)
        factor = tl.exp(within)
        store_rows(asked + row * K, queries * factor, HV * K, place, is_token, channel, K)
        store_rows(grown + row * K, keys * factor, HV * K, place, is_token, channel, K)
        keys *= tl.exp(end[None, :] - within)
        store_rows(left + row * K, keys, HV * K, place, is_token, channel, K)
        of_last = (chunk.to(tl.int64) * HV + head) * K + channel
        tl.store(last + of_last, end, mask=channel < K)
    stride = HV * BLOCK_T
    store_rows(seen + row * BLOCK_T, of_queries, stride, place, is_token, place, BLOCK_T)
    # Above the diagonal may be what float16 does not hold
    of_keys = tl.where(place[:, None] > place[None, :], of_keys, 0.0)
    store_rows(met + row * BLOCK_T, of_keys, stride, place, is_token, place, BLOCK_T)


@triton.jit
def solve_channel_chunks(
    v, v_stride, beta, met, w, u, chunk_first, chunk_count,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W [T, Hv, K], over `grown`, and U [T, Hv, V] of a chunk and head. Grid (N, Hv)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK_T)
    first, is_token = chunk_of(chunk, chunk_first, chunk_count, place)
    row = first * HV + head
    rate = tl.load(beta + row + place * HV, mask=is_token, other=0.0).to(tl.float32)
    of_keys = load_rows(met + row * BLOCK_T, HV * BLOCK_T, place, is_token, place, BLOCK_T)
    kind = w.dtype.element_ty
    is_bounded: tl.constexpr = NORMED and kind != tl.float32
    of_keys = of_keys.to(tl.float32) * rate[:, None]
    inverse = inverted(of_keys, place, is_bounded, PRECISION).to(kind)
    channel = tl.arange(0, BLOCK_K)
    grown = load_rows(w + row * K, HV * K, place, is_token, channel, K).to(tl.float32)
    store_solved(
        inverse, grown, rate, w + row * K, v + first * v_stride + head * V, v_stride, u + row * V,
        place, is_token, HV, K, V, BLOCK_K, BLOCK_V, PRECISION,
    )  # fmt: skip


@triton.jit
def channel_outputs(
    seen, asked, new, kept, out, chunk_first, chunk_count, scaling,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O of a chunk and head's block of columns. Grid (blocks of V, Hv, N)."""
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_T)
    first, is_token = chunk_of(chunk, chunk_first, chunk_count, place)
    row = first * HV + head
    queries = load_rows(asked + row * K, HV * K, place, is_token, channel, K)
    state = load_state(kept, chunk, head, channel, column, HV, K, V)
    result = tl.dot(queries, state, input_precision=PRECISION)
    weights = load_rows(seen + row * BLOCK_T, HV * BLOCK_T, place, is_token, place, BLOCK_T)
    weights = tl.where(place[:, None] >= place[None, :], weights, 0.0)
    added = load_rows(new + row * V, HV * V, place, is_token, column, V)
    result += tl.dot(weights, added, input_precision=PRECISION)
    store_rows(out + row * V, result * scaling, HV * V, place, is_token, column, V)
