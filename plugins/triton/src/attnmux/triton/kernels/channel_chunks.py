"""Linear layers with a decay for each channel (Kimi's delta rule) in chunks of 64 tokens.

As in `linear_chunks`, with G [T, K] the running sum of g in a chunk:

    (I + diag(beta) L) [W U] = diag(beta) [exp(G) K, V]     L_ij = k_i . exp(G_i - G_j) k_j, j < i
    N = U - W S
    S' = exp(G_last) S + (exp(G_last - G) K)^T N
    O = scaling * ((exp(G) Q) S + M N)                      M_ij = q_i . exp(G_i - G_j) k_j, j <= i

L and M are no products of two matrices of bounded numbers, as exp(-G) has no bound. A block of 16
rows is multiplied with an earlier block by way of the place where it begins, P: both of G_i - G_P
and G_P - G_j are sums of g, at most 0. Within a block, each column is made on its own. Source: Kimi
Linear, arXiv:2510.26692, section 3; Yang et al., Gated Linear Attention, arXiv:2312.06635,
section 4.3.

`row_products` makes L, M and all that depends on G alone, `solve_channel_chunks` W and U of all
chunks, `pass_states` goes from chunk to chunk, and `channel_outputs` makes O.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.linear import normed
from attnmux.triton.kernels.linear_chunks import LEAST, inverted, load_rows


@triton.jit
def load_decays(g, token, is_token, head, channel, HV: tl.constexpr, K: tl.constexpr):
    """g [rows, K] of a head's tokens, cut off as in `linear_chunks`; 0 where there is none."""
    return tl.maximum(load_rows(g, HV * K, token, is_token, head, channel, K), LEAST)


@triton.jit
def load_keys(
    k, k_stride, token, is_token, head, channel, K: tl.constexpr, NORMED: tl.constexpr
):  # fmt: skip
    """Rows of Q or K [rows, K] float32. head: of K."""
    rows = load_rows(k, k_stride, token, is_token, head, channel, K).to(tl.float32)
    if NORMED:
        rows = normed(rows)
    return rows


@triton.jit
def row_products(
    q, q_stride, k, k_stride, g, beta, met, seen, asked, grown, left, last,
    chunk_first, chunk_count,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For a block of BLOCK_R rows of a chunk and head: diag(beta) L, `met`, and M, `seen`, both
    [T, Hv, BLOCK_T], in the columns up to the block; `asked` exp(G) Q, `grown` diag(beta) exp(G) K
    and `left` exp(G_last - G) K, all [T, Hv, K]; of the first block, G_last, `last` [N, Hv, K]
    float32. Grid (BLOCK_T / BLOCK_R, Hv, N).
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    first = tl.load(chunk_first + chunk).to(tl.int64)
    count = tl.load(chunk_count + chunk)
    channel = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_R)
    place = block * BLOCK_R + row
    is_token, token = place < count, first + place
    key_head = head // GROUP
    queries = load_keys(q, q_stride, token, is_token, key_head, channel, K, NORMED)
    keys = load_keys(k, k_stride, token, is_token, key_head, channel, K, NORMED)
    rate = tl.load(beta + token * HV + head, mask=is_token, other=0.0).to(tl.float32)
    decays = load_decays(g, token, is_token, head, channel, HV, K)
    within = tl.cumsum(decays, axis=0)
    kind = seen.dtype.element_ty
    of_rows = (token * HV + head)[:, None]

    # Columns of the block itself
    column = tl.arange(0, BLOCK_R)
    met_here = tl.zeros((BLOCK_R, BLOCK_R), dtype=tl.float32)
    seen_here = tl.zeros((BLOCK_R, BLOCK_R), dtype=tl.float32)
    for one in range(BLOCK_R):
        is_one = (row == one)[:, None]
        sum_there = tl.sum(tl.where(is_one, within, 0.0), axis=0)
        key = tl.sum(tl.where(is_one, keys, 0.0), axis=0)
        reached = tl.where((row >= one)[:, None], within - sum_there[None, :], -float("inf"))
        shared = tl.exp(reached) * key[None, :]
        is_column = (column == one)[None, :]
        met_here = tl.where(is_column, tl.sum(keys * shared, axis=1)[:, None], met_here)
        seen_here = tl.where(is_column, tl.sum(queries * shared, axis=1)[:, None], seen_here)
    places = of_rows * BLOCK_T + block * BLOCK_R + column[None, :]
    tl.store(met + places, met_here * rate[:, None], mask=is_token[:, None])
    tl.store(seen + places, seen_here.to(kind), mask=is_token[:, None])

    # Columns of earlier blocks, the nearest first
    decayed = tl.exp(within)
    near_q, near_k = (queries * decayed).to(kind), (keys * decayed).to(kind)
    before = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for back in range(block):
        start = (block - 1 - back) * BLOCK_R
        token_far = first + start + row
        # All of them are tokens if the block has one
        is_far = start + row < count
        far_g = load_decays(g, token_far, is_far, head, channel, HV, K)
        whole = tl.sum(far_g, axis=0)
        far = load_keys(k, k_stride, token_far, is_far, key_head, channel, K, NORMED)
        reached = (whole + before)[None, :] - tl.cumsum(far_g, axis=0)
        far = tl.trans((far * tl.exp(reached)).to(kind))
        found = tl.dot(near_k, far, input_precision=PRECISION) * rate[:, None]
        places = of_rows * BLOCK_T + start + column[None, :]
        tl.store(met + places, found, mask=is_token[:, None])
        found = tl.dot(near_q, far, input_precision=PRECISION)
        tl.store(seen + places, found.to(kind), mask=is_token[:, None])
        before += whole

    after = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range((block + 1) * BLOCK_R, BLOCK_T, BLOCK_R):
        far_g = load_decays(
            g, first + start + row, start + row < count, head, channel, HV, K
        )  # fmt: skip
        after += tl.sum(far_g, axis=0)
    here = tl.sum(decays, axis=0)
    is_there = is_token[:, None] & (channel < K)[None, :]
    places = of_rows * K + channel[None, :]
    since_start = tl.exp(within + before[None, :])
    tl.store(asked + places, (queries * since_start).to(kind), mask=is_there)
    tl.store(grown + places, (keys * since_start * rate[:, None]).to(kind), mask=is_there)
    until_end = tl.exp((here + after)[None, :] - within)
    tl.store(left + places, (keys * until_end).to(kind), mask=is_there)
    if block == 0:
        place_last = last + (chunk.to(tl.int64) * HV + head) * K + channel
        tl.store(place_last, here + after, mask=channel < K)


@triton.jit
def solve_channel_chunks(
    v, v_stride, beta, met, grown, w, u, chunk_first, chunk_count,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """W [T, Hv, K] and U [T, Hv, V] of a chunk and head. Grid (N, Hv)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK_T)
    is_token = place < tl.load(chunk_count + chunk)
    token = (tl.load(chunk_first + chunk) + place).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    kind = w.dtype.element_ty
    is_met = is_token[:, None] & (place[:, None] > place[None, :])
    places = (token * HV + head)[:, None] * BLOCK_T + place[None, :]
    inverse = inverted(tl.load(met + places, mask=is_met, other=0.0), place, PRECISION).to(kind)
    keys = load_rows(grown, HV * K, token, is_token, head, channel, K)
    tl.store(
        w + (token * HV + head)[:, None] * K + channel[None, :],
        tl.dot(inverse, keys, input_precision=PRECISION).to(kind),
        mask=is_token[:, None] & (channel < K)[None, :],
    )
    rate = tl.load(beta + token * HV + head, mask=is_token, other=0.0).to(tl.float32)
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
    is_token = place < tl.load(chunk_count + chunk)
    token = (tl.load(chunk_first + chunk) + place).to(tl.int64)
    queries = load_rows(asked, HV * K, token, is_token, head, channel, K)
    state = tl.load(
        kept + (chunk.to(tl.int64) * HV + head) * (K * V)
        + channel[:, None] * V + column[None, :],
        mask=(channel < K)[:, None] & (column < V)[None, :],
        other=0.0,
    )  # fmt: skip
    result = tl.dot(queries, state, input_precision=PRECISION)
    places = (token * HV + head)[:, None] * BLOCK_T + place[None, :]
    is_seen = is_token[:, None] & (place[:, None] >= place[None, :])
    weights = tl.load(seen + places, mask=is_seen, other=0.0)
    added = load_rows(new, HV * V, token, is_token, head, column, V)
    result += tl.dot(weights, added, input_precision=PRECISION)
    tl.store(
        out + (token * HV + head)[:, None] * V + column[None, :],
        (result * scaling).to(out.dtype.element_ty),
        mask=is_token[:, None] & (column < V)[None, :],
    )
