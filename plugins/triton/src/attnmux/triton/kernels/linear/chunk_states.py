"""The states of linear layers from chunk to chunk of 64 tokens, as `chunks` has them.

A span of chunks turns the state S before it into A S + B. B is its result for a state of zeros. So
long prompts of few heads go through their spans at once: `weigh_spans` finds each A and B,
`join_spans` the state before each span, and `pass_states` then treats every span like a whole
request.

`chunk_indptr`, `starts` [B + 1] int32: each request's first chunk and first token. `last` [N, Hv],
or [N, Hv, K] with a decay for each channel. `span`: chunks of a span; SPANS: of a request, at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.linear.chunks import load_rows, running_decay, store_rows
from attnmux.triton.kernels.linear.tokens import normed


@triton.jit
def end_of(
    last, chunk, is_real, head, channel, HV: tl.constexpr, K: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """G_last of a chunk: of each channel, [K, 1], or of the head."""
    row = chunk.to(tl.int64) * HV + head
    if BY_CHANNEL:
        is_there = is_real & (channel < K)
        end = tl.load(last + row * K + channel, mask=is_there, other=0.0)[:, None]
    else:
        end = tl.load(last + row, mask=is_real, other=0.0)
    return end


@triton.jit
def through_chunk(
    state, end, k, k_stride, v, v_stride, g, beta, w, left, new,
    first, place, is_token, head, column, channel,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_DELTA_RULE: tl.constexpr, HAS_BETA: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state [K, columns] float32 behind a chunk, and N [T, columns], from the state before it.
    first: its first token. Columns from V on have no values."""
    kind = v.dtype.element_ty
    row = first * HV + head
    if HAS_DELTA_RULE:
        added = load_rows(new + row * V, HV * V, place, is_token, column, V).to(tl.float32)
        known_keys = load_rows(w + row * K, HV * K, place, is_token, channel, K)
        added -= tl.dot(known_keys, state.to(kind), input_precision=PRECISION)
        keys = load_rows(left + row * K, HV * K, place, is_token, channel, K)
    else:
        decay = running_decay(g + row, place, is_token, HV)
        end = tl.min(decay, axis=0)
        keys = k + first * k_stride + head // GROUP * K
        keys = load_rows(keys, k_stride, place, is_token, channel, K).to(tl.float32)
        if NORMED:
            keys = normed(keys)
        keys = (keys * tl.exp(end - decay)[:, None]).to(kind)
        added = load_rows(v + first * v_stride + head * V, v_stride, place, is_token, column, V)
        added = added.to(tl.float32)
        if HAS_BETA:
            rate = tl.load(beta + row + place * HV, mask=is_token, other=0.0)
            added *= rate.to(tl.float32)[:, None]
    added = added.to(kind)
    new_state = tl.dot(tl.trans(keys), added, input_precision=PRECISION)
    return state * tl.exp(end) + new_state, added


@triton.jit
def span_of(chunk_indptr, starts, program, span, SPANS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The span of a program, the `program % SPANS`-th of request `program // SPANS`: the request,
    the first chunk, the chunks from there to the request's end, the first token, and the end of
    tokens.
    """
    request = program // SPANS
    skipped = program % SPANS * span
    first_chunk = tl.load(chunk_indptr + request) + skipped
    chunks = tl.load(chunk_indptr + request + 1) - first_chunk
    first = tl.load(starts + request).to(tl.int64) + skipped * BLOCK_T
    return request, first_chunk, chunks, first, tl.load(starts + request + 1)


@triton.jit
def start_of(
    states, known, row, request, head, within, is_there, HV: tl.constexpr, SIZE: tl.constexpr
):
    """Where a request's state is, and the state before the step."""
    places = states + (row * HV + head) * SIZE + within
    is_known = tl.load(known + request) != 0
    return places, tl.load(places, mask=is_there & is_known, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["span"])
def pass_states(
    k, k_stride, v, v_stride, g, beta, w, left, last, new, kept, states, rows, known, joined,
    chunk_indptr, starts, span,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_DELTA_RULE: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """S before each chunk, `kept` [N, Hv, K, V], and its N, `new` [T, Hv, V], which holds U first
    if there is a delta rule. Writes the states. `joined` [B * SPANS, Hv, K, V] float32: S before
    each span, if SPANS > 1. Grid (blocks of V, Hv, B * SPANS).
    """
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    program = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_T)
    request, chunk, chunks, first, until = span_of(
        chunk_indptr, starts, program, span, SPANS, BLOCK_T
    )
    if (chunks > 0) | (program % SPANS == 0):
        is_there = (channel < K)[:, None] & (column < V)[None, :]
        within = channel[:, None] * V + column[None, :]
        row = tl.load(rows + request)
        places, state = start_of(states, known, row, request, head, within, is_there, HV, K * V)
        if SPANS > 1:
            before = joined + (program.to(tl.int64) * HV + head) * (K * V) + within
            state = tl.load(before, mask=is_there, other=0.0)
        end = 0.0
        if HAS_DELTA_RULE:
            end = end_of(last, chunk, chunks > 0, head, channel, HV, K, BY_CHANNEL)
        for rank in range(tl.minimum(chunks, span)):
            of_kept = ((chunk + rank).to(tl.int64) * HV + head) * (K * V) + within
            tl.store(kept + of_kept, state.to(kept.dtype.element_ty), mask=is_there)
            after = end
            if HAS_DELTA_RULE:
                following = chunk + rank + 1
                after = end_of(last, following, rank + 1 < chunks, head, channel, HV, K, BY_CHANNEL)
            token = first + rank * BLOCK_T
            is_token = place < until - token
            state, added = through_chunk(
                state, end, k, k_stride, v, v_stride, g, beta, w, left, new,
                token, place, is_token, head, column, channel,
                HV, GROUP, K, V, HAS_DELTA_RULE, HAS_BETA, NORMED, PRECISION,
            )  # fmt: skip
            end = after
            of_new = (token * HV + head) * V
            store_rows(new + of_new, added, HV * V, place, is_token, column, V)
        if chunks <= span:
            tl.store(places, state.to(states.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["span"])
def weigh_spans(
    k, k_stride, v, v_stride, g, beta, w, left, last, new, effects, chunk_indptr, starts, span,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_DELTA_RULE: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """B and A of each span but the requests' last, `effects` [B * SPANS, Hv, K, V + K] float32.
    Columns from V on start as the unit matrix and have no values, which makes them A. Grid (blocks
    of V + K, Hv, B * SPANS).
    """
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    program = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_T)
    _, chunk, chunks, first, until = span_of(chunk_indptr, starts, program, span, SPANS, BLOCK_T)
    if chunks > span:
        state = tl.where(column[None, :] == V + channel[:, None], 1.0, 0.0)
        end = 0.0
        if HAS_DELTA_RULE:
            end = end_of(last, chunk, True, head, channel, HV, K, BY_CHANNEL)
        for rank in range(span):
            after = end
            if HAS_DELTA_RULE:
                after = end_of(last, chunk + rank + 1, True, head, channel, HV, K, BY_CHANNEL)
            token = first + rank * BLOCK_T
            state, _added = through_chunk(
                state, end, k, k_stride, v, v_stride, g, beta, w, left, new,
                token, place, place < until - token, head, column, channel,
                HV, GROUP, K, V, HAS_DELTA_RULE, HAS_BETA, NORMED, PRECISION,
            )  # fmt: skip
            end = after
        number = program.to(tl.int64) * HV + head
        is_there = (channel < K)[:, None] & (column < V + K)[None, :]
        tl.store(
            effects + (number * K + channel[:, None]) * (V + K) + column[None, :],
            state,
            mask=is_there,
        )


@triton.jit(do_not_specialize=["span"])
def join_spans(
    effects, states, rows, known, joined, chunk_indptr, span,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """S before each span, `joined` [B * SPANS, Hv, K, V] float32. Grid (blocks of V, Hv, B).

    A is read in blocks of 32 columns, and their rows of S from global memory: a whole A does not
    fit into the shared memory of every device.
    """
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    request = tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    is_channel = channel < K
    is_column = (column < V)[None, :]
    is_there = is_channel[:, None] & is_column
    within = channel[:, None] * V + column[None, :]
    row = tl.load(rows + request)
    _, state = start_of(states, known, row, request, head, within, is_there, HV, K * V)
    chunks = tl.load(chunk_indptr + request + 1) - tl.load(chunk_indptr + request)
    number = (request * SPANS).to(tl.int64) * HV + head
    tl.store(joined + number * (K * V) + within, state, mask=is_there)
    for _rank in range(tl.cdiv(chunks, span) - 1):
        tl.debug_barrier()
        before = joined + number * (K * V)
        effect = effects + number * K * (V + K) + channel[:, None] * (V + K)
        state = tl.load(effect + column[None, :], mask=is_there, other=0.0)
        for start in range(0, K, 32):
            met = start + tl.arange(0, 32)
            is_met = met < K
            passed = effect + V + met[None, :]
            passed = tl.load(passed, mask=is_channel[:, None] & is_met[None, :], other=0.0)
            known_rows = before + met[:, None] * V + column[None, :]
            known_rows = tl.load(known_rows, mask=is_met[:, None] & is_column, other=0.0)
            state += tl.dot(passed, known_rows, input_precision=PRECISION)
        number += HV
        tl.store(joined + number * (K * V) + within, state, mask=is_there)
