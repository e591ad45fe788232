"""Linear layers token by token: their recurrence, for few new tokens a request, and convolutions.

Docstrings name the tensors of `LinearCall` and `ConvCall`. `rows` [B] int64: each request's row of
the states. `known` [B] int32: 0 where a request starts from zeros; less 1 in decode, where it is
the length after the step. `starts` [B + 1] int32: each request's first token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.core import L2_EPS

EPS = tl.constexpr(L2_EPS)


@triton.jit
def over_lengths(x):
    """[n]: one over the length of each row of x [n, K] float32."""
    return tl.rsqrt(tl.sum(x * x, axis=1) + EPS)


@triton.jit
def normed(x):
    """Rows of x [n, K] float32, divided by their lengths."""
    return x * over_lengths(x)[:, None]


@triton.jit
def recur(
    q, q_stride, k, k_stride, v, v_stride, g, beta, out, states, rows, known, starts, scaling,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_DELTA_RULE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr, NORMED: tl.constexpr,
    IS_DECODE: tl.constexpr,
):  # fmt: skip
    """One V head's block of columns of a request: read the state, run its tokens, write the state.

    g, beta, out and states are contiguous. Grid (blocks of V, Hv, B).
    """
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    request = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    is_channel, is_column = channel < K, column < V
    row = tl.load(rows + request)
    if IS_DECODE:
        first, count = request, 1
        is_fresh = tl.load(known + request) <= 1
    else:
        first = tl.load(starts + request)
        count = tl.load(starts + request + 1) - first
        is_fresh = tl.load(known + request) == 0
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
    tl.store(places, state.to(states.dtype.element_ty), mask=is_there)


@triton.jit
def convolve(
    x, x_stride, weight, bias, out, states, rows, known, starts, request_of, num_tokens,
    C: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution of tokens in steps with many. Inputs before a request's first token are read
    from the states, which another kernel writes afterwards.

    request_of [num_tokens] int32: each token's request; a negative one has none, and gets zeros.
    Grid (blocks of tokens, blocks of C).
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = column < C
    request = tl.load(request_of + token, mask=token < num_tokens, other=-1)
    is_token = request >= 0
    row = tl.load(rows + request, mask=is_token, other=0)
    place = token - tl.load(starts + request, mask=is_token, other=0)
    is_known = is_token & (tl.load(known + request, mask=is_token, other=0) != 0)
    result = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        back = W - 1 - tap
        is_new = is_token & (place >= back)
        values = tl.load(
            x + (token - back).to(tl.int64)[:, None] * x_stride + column[None, :],
            mask=is_new[:, None] & is_column[None, :],
            other=0.0,
        ).to(tl.float32)
        if back > 0:
            held = (row * (W - 1) + tap + place)[:, None] * C + column[None, :]
            is_old = is_known & (place < back)
            values += tl.load(
                states + held, mask=is_old[:, None] & is_column[None, :], other=0.0
            ).to(tl.float32)
        taps = tl.load(weight + column * W + tap, mask=is_column, other=0.0).to(tl.float32)
        result += values * taps[None, :]
    if SILU:
        result *= tl.sigmoid(result)
    tl.store(
        out + token.to(tl.int64)[:, None] * C + column[None, :],
        tl.where(is_token[:, None], result, 0.0).to(out.dtype.element_ty),
        mask=(token < num_tokens)[:, None] & is_column[None, :],
    )


@triton.jit
def keep_inputs(
    x, x_stride, states, rows, known, starts,
    C: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the last W - 1 inputs of each request to its row. Grid (B, blocks of C)."""
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.arange(0, BLOCK_W)
    row = tl.load(rows + request)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    is_known = tl.load(known + request) != 0
    is_there = (place < W - 1)[:, None] & (column < C)[None, :]
    token = count - (W - 1) + place
    values = tl.load(
        x + (first + token).to(tl.int64)[:, None] * x_stride + column[None, :],
        mask=is_there & (token >= 0)[:, None],
        other=0.0,
    )
    old = tl.load(
        states + (row * (W - 1) + place + count)[:, None] * C + column[None, :],
        mask=is_there & (token < 0)[:, None] & is_known,
        other=0.0,
    )
    kept = tl.where((token >= 0)[:, None], values.to(states.dtype.element_ty), old)
    # Every row of the old inputs must be read before one is written
    tl.debug_barrier()
    tl.store(states + (row * (W - 1) + place)[:, None] * C + column[None, :], kept, mask=is_there)


@triton.jit
def convolve_one(
    x, x_stride, weight, bias, out, states, rows, known,
    C: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution of one token a request, and its states. Grid (B, blocks of C)."""
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = column < C
    row = tl.load(rows + request)
    is_known = is_column & (tl.load(known + request) > 1)
    newest = tl.load(x + request.to(tl.int64) * x_stride + column, mask=is_column, other=0.0)
    result = newest.to(tl.float32) * tl.load(
        weight + column * W + W - 1, mask=is_column, other=0.0
    ).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        held = tl.load(states + (row * (W - 1) + tap) * C + column, mask=is_known, other=0.0)
        taps = tl.load(weight + column * W + tap, mask=is_column, other=0.0)
        result += held.to(tl.float32) * taps.to(tl.float32)
        if tap > 0:
            tl.store(states + (row * (W - 1) + tap - 1) * C + column, held, mask=is_column)
    if W > 1:
        kept = newest.to(states.dtype.element_ty)
        tl.store(states + (row * (W - 1) + W - 2) * C + column, kept, mask=is_column)
    if SILU:
        result *= tl.sigmoid(result)
    tl.store(
        out + request.to(tl.int64) * C + column, result.to(out.dtype.element_ty), mask=is_column
    )
