"""The softmax of `tiles`: a block's weights, and their form between two turns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmux.triton.kernels.hopper.rescaling import raised

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def weigh(logits, top, mass, block, first, end, scale, cap, HIDES: gl.constexpr, kind):
    """A block's weights [M, BLOCK_N], the factor [M] of the earlier ones, and the new top and mass.

    logits [M, BLOCK_N], top and mass [M]: as in `attend_blocks`, except that logits times `scale`
    are in units of log 2. scale: a number, or [M] if queries are rounded. first, end [M]: the keys
    that each row sees; without HIDES nothing is compared.
    """
    scale_of_rows = scale
    if kind.ROUNDS_QUERIES:
        scale_of_rows = scale[:, None]
    if kind.HAS_CAP:
        logits = capped(logits, scale_of_rows, cap)
        scale = 1.0
        scale_of_rows = 1.0
    if HIDES:
        columns = gl.arange(0, kind.BLOCK_N, gl.SliceLayout(0, logits.type.layout))
        # Bits 1 and 2 depend on the thread: without them the columns are constants.
        own = (columns & 6)[None, :] + block * kind.BLOCK_N
        columns = (columns & (kind.BLOCK_N - 7))[None, :]
        sees = columns < end[:, None] - own
        if kind.WINDOW >= 0 or kind.CHUNK > 0:
            sees = sees & (columns >= first[:, None] - own)
        logits = gl.where(sees, logits, -float("inf"))
    higher = raised(top, gl.max(logits, 1), scale, kind.ROUNDS_WEIGHTS)
    base = higher
    if HIDES:
        # A row that has seen no key yet: inf - inf is NaN.
        base = gl.where(higher == -float("inf"), 0.0, higher)
    weights = gl.exp2(logits * scale_of_rows - (base * scale)[:, None])
    # Exactly 1 where `top` stays. A fused top * scale - base * scale would be its rounding error,
    # once for each block of the tile that the row does not see.
    kept_share = gl.exp2((top - base) * scale)
    return weights, kept_share, higher, mass * kept_share + gl.sum(weights, 1)


@gluon.jit
def capped(logits, scale, cap):
    """cap * tanh(logits * scale / cap), in units of log 2. scale: a number, or of a shape that
    logits broadcast with."""
    return (cap * LOG2_E) * tanh(logits * (scale / cap))


@gluon.jit
def tanh(numbers):
    """With a relative error of at most 2^-11 (PTX ISA, "tanh"), by one instruction. With an
    exponential and a reciprocal, which are nearer, prompts of heads of 64 take 1.3 times as
    long."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [numbers], gl.float32, True, 1
    )


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """[M, N // 2] int32: pairs of weights of a 16-bit dtype. Between two turns the assembler would
    keep single values, and pack them again in each."""
    even, odd = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
        )
    return pairs


@gluon.jit
def unpack(pairs, dtype: gl.constexpr):
    """The inverse of `pack`; it compiles to no instruction."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1
    )
    both = gl.join(even, odd).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return both.to(dtype, bitcast=True)


@gluon.jit
def order_weights(weights):
    """[M, N]: keys 0, 1, 8, 9, 2, 3, 10, 11 and so on of every 16. A thread then has the columns of
    the left operand of 8 bits that it has computed."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    return weights.reshape([M, N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([M, N])


@gluon.jit
def pack_quads(weights):
    """[M, N // 4] int32: weights as e4m3, four by four, for the reason of `pack`."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    even, odd = weights.reshape([M, N // 4, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [first, second, third, fourth],
        gl.int32,
        True,
        1,
    )


@gluon.jit
def unpack_quads(quads):
    """The inverse of `pack_quads`, as float8e4nv."""
    even = gl.join(byte_of(quads, 0), byte_of(quads, 2))
    odd = gl.join(byte_of(quads, 1), byte_of(quads, 3))
    return gl.join(even, odd).reshape([quads.shape[0], quads.shape[1] * 4])


@gluon.jit
def byte_of(quads, AT: gl.constexpr):
    return (quads >> (8 * AT)).to(gl.int8).to(gl.float8e4nv, bitcast=True)
