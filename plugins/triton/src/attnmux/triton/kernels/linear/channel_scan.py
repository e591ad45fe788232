"""Selective scans: linear layers whose every channel is a V head with a V of one dim.

A state is then a row of K numbers. A program holds those of a tile of channels in registers and
goes from token to token; no product of matrices would be larger than one row. Tensors and DRAFTS
are as in `tokens.recur`, with `states` [rows, Hv, K, 1] and g [T, Hv, K].
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.linear.tokens import normed, tokens_of


@triton.jit
def load_key(
    x, stride, token, channel, column, is_channel, is_column,
    GROUP: tl.constexpr, K: tl.constexpr, IS_SHARED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Q or K of a token in float32: [channels, K], or [1, K] for all channels together."""
    if IS_SHARED:
        place = x + token * stride + column[None, :]
        row = tl.load(place, mask=is_column[None, :], other=0.0).to(tl.float32)
    else:
        place = x + token * stride + (channel // GROUP * K)[:, None] + column[None, :]
        is_there = is_channel[:, None] & is_column[None, :]
        row = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    if NORMED:
        row = normed(row)
    return row


@triton.jit
def scan_channels(
    q, q_stride, k, k_stride, v, v_stride, g, beta, out, states, drafted, rows, known, starts,
    scaling,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BETA: tl.constexpr, NORMED: tl.constexpr,
    IS_DECODE: tl.constexpr, DRAFTS: tl.constexpr, ROOM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of a request's channels: read the states, run its tokens, write the states, or those
    after each draft token.

    g, beta, out, states and drafted are contiguous. STAGES: tokens that are loaded ahead. Grid
    (tiles of channels, B).
    """
    channel = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    request = tl.program_id(1)
    column = tl.arange(0, BLOCK_K)
    is_channel, is_column = channel < HV, column < K
    is_there = is_channel[:, None] & is_column[None, :]
    within = channel[:, None] * K + column[None, :]
    row = tl.load(rows + request)
    first, count, is_fresh = tokens_of(request, known, starts, IS_DECODE, DRAFTS)
    places = states + row * (HV * K) + within
    state = tl.load(places, mask=is_there & (is_fresh == 0), other=0.0).to(tl.float32)
    for step in tl.range(count, num_stages=STAGES):
        token = (first + step).to(tl.int64)
        decay = tl.load(g + token * (HV * K) + within, mask=is_there, other=0.0)
        added = tl.load(v + token * v_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
        if HAS_BETA:
            rate = tl.load(beta + token * HV + channel, mask=is_channel, other=0.0)
            added *= rate.to(tl.float32)
        key = load_key(
            k, k_stride, token, channel, column, is_channel, is_column,
            GROUP, K, GROUP == HV, NORMED,
        )  # fmt: skip
        query = load_key(
            q, q_stride, token, channel, column, is_channel, is_column,
            GROUP, K, GROUP == HV, NORMED,
        )  # fmt: skip
        state = state * tl.exp(decay) + added[:, None] * key
        result = tl.sum(state * query, axis=1) * scaling
        tl.store(out + token * HV + channel, result.to(out.dtype.element_ty), mask=is_channel)
        if DRAFTS > 0:
            after = drafted + (row * ROOM + step) * (HV * K) + within
            tl.store(after, state.to(drafted.dtype.element_ty), mask=is_there)
    if DRAFTS == 0:
        tl.store(places, state.to(states.dtype.element_ty), mask=is_there)
