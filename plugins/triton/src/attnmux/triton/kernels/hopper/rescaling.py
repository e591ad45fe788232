"""Rescaling of a running softmax's results, which most blocks of keys do not need.

A row's `top` need not be the largest of its logits so far: any number near it keeps the weights in
range. So `raised` moves it only when a block exceeds it by far, and `rescaled` multiplies nothing
in the warps whose rows all keep their top.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(8.0)
"""Weights are at most this power of 2. 16-bit formats hold them as exactly as weights below 1."""


ROOM = gl.constexpr(6.0)
"""New tops are so much lower if weights are rounded to e4m3: weights of 2^-12 of the largest are
then normal numbers of it. Those of 2^SLACK are still below its largest, 448."""


@gluon.jit
def raised(top, block_top, scale, ROUNDS_WEIGHTS: gl.constexpr = False):
    """The new top [M]. block_top [M]: the largest logit of a block; times scale, in units of log 2.

    It depends only on the row's own logits, so that a row's bits do not depend on its neighbours.
    """
    highest = gl.maximum(top, block_top)
    higher = highest
    if ROUNDS_WEIGHTS:
        higher = highest - ROOM / scale
    # Before a row's first key, -inf - -inf is NaN, which is not above SLACK.
    return gl.where((highest - top) * scale > SLACK, higher, top)


@gluon.jit
def rescaled(acc, share):
    """acc [M, N] times share [M], for acc of a matrix instruction's layout."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    share = gl.convert_layout(share, rows)
    changes = gl.broadcast(changes_in_warp(share)[:, None], acc)[0]
    share = gl.broadcast(share[:, None], acc)[0]
    COUNT: gl.constexpr = min(32, acc.shape[1] // 2)
    return gl.inline_asm_elementwise(
        products_unless_zero(COUNT),
        operands_of_products(COUNT),
        [acc, share, changes],
        gl.float32,
        True,
        COUNT,
    )


@gluon.jit
def changes_in_warp(share):
    """[M] int32: 0 in the warps whose rows all have a share of 1. A thread has two rows."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first, second;
        setp.neu.f32 first, $2, 0f3F800000;
        setp.neu.f32 second, $3, 0f3F800000;
        or.pred first, first, second;
        vote.sync.any.pred first, first, 0xffffffff;
        selp.s32 $0, 1, 0, first;
        selp.s32 $1, 1, 0, first;
        }""",
        "=r,=r,f,f",
        [share],
        gl.int32,
        True,
        2,
    )


@gluon.constexpr_function
def products_unless_zero(count):
    """PTX of `count` products, which a warp skips if the number after their factors is 0."""
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};\n" for i in range(count))
    return (
        f"{{\n.reg .pred skips;\nsetp.eq.s32 skips, ${3 * count}, 0;\n"
        f"@skips bra.uni DONE;\n{products}DONE:\n}}"
    )


@gluon.constexpr_function
def operands_of_products(count):
    """The constraints of `products_unless_zero`: results in the places of the first factors."""
    return ",".join([*["=f"] * count, *map(str, range(count)), *["f"] * count, *["r"] * count])
