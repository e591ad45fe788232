"""The drafts of a tree attend to each other, merged with attention to their prefix."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.blocks import load_rows


@triton.jit(do_not_specialize=["drafts"])
def attend_drafts(
    q, q_stride, q_head_stride, q_rope, q_rope_stride, q_rope_head_stride,
    k, k_stride, k_head_stride, v, v_stride, v_head_stride, slots, visible,
    seen, seen_stride, seen_row_stride, seen_lse, seen_lse_stride, has_prefix, sinks,
    out, lse, lse_stride, scaling, v_scale, cap, drafts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    DV: tl.constexpr, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """q [B * WIDTH, KV_HEADS * GROUP, D], q_rope the same with ROPE columns or None; k [slots,
    KV_HEADS, D + ROPE] and v [slots, KV_HEADS, DV] of a pool; slots [B * WIDTH] int64 are the
    drafts'; visible [B, WIDTH, WIDTH], not 0 where a draft sees another. seen [B, KV_HEADS * drafts
    * GROUP, DV] and seen_lse, the same without DV: attention to the prefixes, the drafts' rows of a
    KV head together. has_prefix [B]: if it is 0, the prefix is the sinks [KV_HEADS * GROUP] or, if
    they are None, nothing. out [B * WIDTH, KV_HEADS * GROUP, DV], contiguous; lse [B * WIDTH,
    KV_HEADS * GROUP] float32 or None.

    scaling: with the pool's scale of K. cap: of the logits, used if HAS_CAP. Rows of BLOCK_M are
    the drafts of one request and KV head, times its GROUP query heads; columns go by in blocks of
    BLOCK_C.

    Grid: blocks of rows, KV_HEADS, B.
    """
    request = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < WIDTH * GROUP
    draft = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = request * WIDTH + draft
    other = tl.arange(0, BLOCK_N)
    is_other = other < WIDTH
    slot = tl.load(slots + request * WIDTH + other, mask=is_other, other=0).to(tl.int64)
    keys = slot * k_stride + kv_head * k_head_stride
    queries = token * q_stride + head * q_head_stride
    logits = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        left = load_rows(q + start, queries, 1, is_row, BLOCK_C, D - start, True).to(DTYPE)
        right = load_rows(k + start, keys, 1, is_other, BLOCK_C, D - start, True).to(DTYPE)
        logits = tl.dot(left, tl.trans(right), logits, input_precision=PRECISION)
    if ROPE > 0:
        queries = token * q_rope_stride + head * q_rope_head_stride
        left = load_rows(q_rope, queries, 1, is_row, BLOCK_R, ROPE, True).to(DTYPE)
        right = load_rows(k + D, keys, 1, is_other, BLOCK_R, ROPE, True).to(DTYPE)
        logits = tl.dot(left, tl.trans(right), logits, input_precision=PRECISION)
    logits *= scaling
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (1 + e^2x)
        logits = cap * (1 - 2 / (1 + tl.exp(2 * logits / cap)))
    sees = tl.load(
        visible + token[:, None] * WIDTH + other[None, :],
        mask=is_row[:, None] & is_other[None, :],
        other=0,
    )
    logits = tl.where(sees != 0, logits, float("-inf"))

    seen_row = kv_head * drafts * GROUP + row
    reads = is_row & (tl.load(has_prefix + request) != 0)
    prefix = tl.load(
        seen_lse + request * seen_lse_stride + seen_row, mask=reads, other=float("-inf")
    )
    if sinks is not None:
        prefix = tl.where(reads, prefix, tl.load(sinks + head, mask=is_row, other=float("-inf")))
    top = tl.maximum(tl.max(logits, 1), prefix)
    # A row of no request may see nothing: inf - inf is NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(logits - base[:, None])
    share = tl.exp(prefix - base)
    mass = tl.sum(weights, 1) + share
    scale = 1 / tl.where(mass > 0, mass, 1.0)
    share *= scale
    weights = (weights * (scale * v_scale)[:, None]).to(DTYPE)
    rows = token * (KV_HEADS * GROUP) + head

    values = slot * v_stride + kv_head * v_head_stride
    prefixes = request * seen_stride + seen_row.to(tl.int64) * seen_row_stride
    for start in tl.static_range(0, DV, BLOCK_C):
        found = load_rows(seen + start, prefixes, 1, reads, BLOCK_C, DV - start, True)
        right = load_rows(v + start, values, 1, is_other, BLOCK_C, DV - start, True).to(DTYPE)
        merged = share[:, None] * found.to(tl.float32)
        merged = tl.dot(weights, right, merged, input_precision=PRECISION)
        column = start + tl.arange(0, BLOCK_C)
        tl.store(
            out + rows[:, None] * DV + column[None, :],
            merged.to(out.dtype.element_ty),
            mask=is_row[:, None] & (column < DV)[None, :],
        )
    if lse is not None:
        total = tl.where(mass > 0, base + tl.log(mass), float("-inf"))
        tl.store(lse + token * lse_stride + head, total, mask=is_row)
