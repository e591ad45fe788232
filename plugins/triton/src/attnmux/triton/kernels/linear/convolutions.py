"""The short convolutions of linear layers.

Docstrings name the tensors of `ConvCall`, and `rows`, `known`, `starts` and `drafted` as `tokens`
does.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def convolve_drafts(
    x, x_stride, weight, bias, out, states, drafted, rows, known,
    C: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_C: tl.constexpr, DRAFTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The convolution of one draft token, and its input in the request's row of `drafted`
    [rows, ROOM, C]; of a request's first one, the inputs before it too. Grid (B, DRAFTS, blocks
    of C)."""
    request = tl.program_id(0)
    place = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = column < C
    row = tl.load(rows + request)
    is_known = is_column & (tl.load(known + request) > 0)
    first = (request * DRAFTS).to(tl.int64)
    result = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        is_new = place >= back
        values = tl.load(
            x + (first + place - back) * x_stride + column, mask=is_column & is_new, other=0.0
        ).to(tl.float32)
        if back > 0:
            held = (row * (W - 1) + tap + place) * C + column
            is_old = is_known & (place < back)
            values += tl.load(states + held, mask=is_old, other=0.0).to(tl.float32)
        taps = tl.load(weight + column * W + tap, mask=is_column, other=0.0).to(tl.float32)
        result += values * taps
    if SILU:
        result *= tl.sigmoid(result)
    tl.store(out + (first + place) * C + column, result.to(out.dtype.element_ty), mask=is_column)
    own = tl.load(x + (first + place) * x_stride + column, mask=is_column, other=0.0)
    tl.store(
        drafted + (row * ROOM + W - 1 + place) * C + column,
        own.to(drafted.dtype.element_ty),
        mask=is_column,
    )
    for tap in tl.static_range(W - 1):
        held = tl.load(states + (row * (W - 1) + tap) * C + column, mask=is_known, other=0.0)
        is_first = is_column & (place == 0)
        tl.store(drafted + (row * ROOM + tap) * C + column, held, mask=is_first)


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
