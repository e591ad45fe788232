"""Linear layers token by token: their recurrence, for few new tokens a request.

Docstrings name the tensors of `LinearCall`. `rows` [B] int64: each request's row of the states.
`known` [B] int32: 0 where a request starts from zeros; less 1 in decode, where it is the length
after the step. `starts` [B + 1] int32: each request's first token. DRAFTS: the draft tokens of each
request in a step that verifies them, else 0; `drafted` are then the states after each of them; a
row holds ROOM.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.core import LinearLayerSpec

EPS = tl.constexpr(LinearLayerSpec.L2_EPS)


@triton.jit
def over_lengths(x):
    """[n]: one over the length of each row of x [n, K] float32."""
    return tl.rsqrt(tl.sum(x * x, axis=1) + EPS)


@triton.jit
def normed(x):
    """Rows of x [n, K] float32, divided by their lengths."""
    return x * over_lengths(x)[:, None]


@triton.jit
def tokens_of(request, known, starts, IS_DECODE: tl.constexpr, DRAFTS: tl.constexpr):
    """A request's first token, its number of tokens, and whether it starts from zeros."""
    if IS_DECODE:
        first, count = request, 1
        is_fresh = tl.load(known + request) <= 1
    elif DRAFTS > 0:
        first, count = request * DRAFTS, DRAFTS
        is_fresh = tl.load(known + request) <= 0
    else:
        first = tl.load(starts + request)
        count = tl.load(starts + request + 1) - first
        is_fresh = tl.load(known + request) == 0
    return first, count, is_fresh


@triton.jit
def recur(
    q, q_stride, k, k_stride, v, v_stride, g, beta, out, states, drafted, rows, known, starts,
    scaling,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_DELTA_RULE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr, NORMED: tl.constexpr,
    IS_DECODE: tl.constexpr, DRAFTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One V head's block of columns of a request: read the state, run its tokens, write the state,
    or those after each draft token.

    g, beta, out, states and drafted are contiguous. Grid (blocks of V, Hv, B).
    """
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    request = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    is_channel, is_column = channel < K, column < V
    row = tl.load(rows + request)
    first, count, is_fresh = tokens_of(request, known, starts, IS_DECODE, DRAFTS)
    places = states + ((row * HV + head) * K + channel[:, None]) * V + column[None, :]
    is_there = is_channel[:, None] & is_column[None, :]
    state = tl.load(places, mask=is_there & (is_fresh == 0), other=0.0).to(tl.float32)
    for step in range(count):
        token = (first + step).to(tl.int64)
        key = tl.load(
            k + token * k_stride + (head // GROUP) * K + channel, mask=is_channel, other=0.0
        ).to(tl.float32)
        query = tl.load(
            q + token * q_stride + (head // GROUP) * K + channel, mask=is_channel, other=0.0
        ).to(tl.float32)
        if NORMED:
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS)
        added = tl.load(v + token * v_stride + head * V + column, mask=is_column, other=0.0)
        added = added.to(tl.float32)
        if BY_CHANNEL:
            decay = tl.load(g + (token * HV + head) * K + channel, mask=is_channel, other=0.0)
            state *= tl.exp(decay)[:, None]
        else:
            state *= tl.exp(tl.load(g + token * HV + head))
        if HAS_DELTA_RULE:
            added -= tl.sum(state * key[:, None], axis=0)
        if HAS_BETA:
            added *= tl.load(beta + token * HV + head).to(tl.float32)
        state += key[:, None] * added[None, :]
        result = tl.sum(state * query[:, None], axis=0) * scaling
        tl.store(
            out + (token * HV + head) * V + column,
            result.to(out.dtype.element_ty),
            mask=is_column,
        )
        if DRAFTS > 0:
            after = ((row * ROOM + step) * HV + head) * K + channel[:, None]
            tl.store(
                drafted + after * V + column[None, :],
                state.to(drafted.dtype.element_ty),
                mask=is_there,
            )
    if DRAFTS == 0:
        tl.store(places, state.to(states.dtype.element_ty), mask=is_there)
