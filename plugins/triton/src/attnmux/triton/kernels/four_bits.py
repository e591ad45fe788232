"""Loads keys and values of 4-bit floats as 16 bits.

Values are E2M1 numbers, eight to a word of 32 bits, and 16 of them share a scale in E4M3. The 3
lower bits of a value, moved to the lowest exponent bits and the highest mantissa bit of a float16,
are the value times 2**-14. Two values that are 16 bits apart in a word become two float16 in a word
by the same few instructions: so a tile's columns are in the order of `real_columns`. A product sums
over the columns of Q and K in any order, and the columns of a result are stored where they belong.
"""

from __future__ import annotations

import triton
import triton.language as tl

FACTOR = tl.constexpr(128)
"""The factor of tiles: a float16 holds any product of a value and its block's scale exactly, but
not a scale times 2**14."""
BY_TRITON, BY_PTX, BY_PTX_OF_SM89 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""How values are widened: by operations of Triton alone, or by NVIDIA's instructions."""
VALUES = tl.constexpr(8)
"""Values in a word."""
SIGNS = tl.constexpr(-0x7FFF8000)
SIZES = tl.constexpr(0x0E000E00)


@triton.jit
def real_columns(WIDTH: tl.constexpr):
    """[WIDTH] int32: the columns of a layer that a tile's columns hold."""
    column = tl.arange(0, WIDTH)
    return column // 8 * 8 + column % 8 // 2 + column % 2 * 4


@triton.jit
def load_words(base, rows, row_stride, is_there, WORDS: tl.constexpr, REAL_WORDS: tl.constexpr,
               CHECKED: tl.constexpr):  # fmt: skip
    """[N, WORDS] int32: rows [N] of a matrix, with 0 where there is none."""
    columns = tl.arange(0, WORDS)
    places = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    if WORDS != REAL_WORDS:
        within = columns[None, :] < REAL_WORDS
        if CHECKED:
            within = within & is_there[:, None]
        return tl.load(places, mask=within, other=0)
    if CHECKED:
        return tl.load(places, mask=is_there[:, None], other=0)
    return tl.load(places)


@triton.jit
def spread(words, EACH: tl.constexpr):
    """[N, W, EACH]: each of words [N, W] EACH times, in the registers of one thread."""
    return tl.broadcast_to(
        words.reshape([words.shape[0], words.shape[1], 1]),
        [words.shape[0], words.shape[1], EACH],
    )


@triton.jit
def pairs_of(words):
    """[N, 4 * W]: values 0 and 4, 1 and 5, 2 and 6, 3 and 7 of words [N, W], as float16."""
    place = tl.arange(0, 4)[None, None, :]
    signs_first = spread(words, 4) << (12 - 4 * place)
    pairs = (signs_first & SIGNS) | ((signs_first >> 3) & SIZES)
    return pairs.reshape([words.shape[0], 4 * words.shape[1]])


@triton.jit
def halves_of(pairs):
    """[N, 2 * W] float16: the lower and the upper halves of pairs [N, W]."""
    halves = (spread(pairs, 2) >> (16 * tl.arange(0, 2)[None, None, :])).to(tl.int16)
    return halves.to(tl.float16, bitcast=True).reshape([pairs.shape[0], 2 * pairs.shape[1]])


@triton.jit
def scales_of(words, SCALES: tl.constexpr, FIRST: tl.constexpr):
    """[N, SCALES] float16: the scales from byte FIRST of words on, times 2**7."""
    EACH: tl.constexpr = SCALES if SCALES < 4 else 4
    scales = spread(words, EACH) >> (8 * (FIRST + tl.arange(0, EACH)))[None, None, :]
    scales = scales.reshape([words.shape[0], SCALES]) & 0x7F
    # An exponent of E4M3 is 8 less than that of a float16 with the same bits.
    numbers = (scales << 7).to(tl.int16).to(tl.float16, bitcast=True) * 32768.0
    # All bits of the exponent, and one of the mantissa, where the scale is NaN.
    is_nan = (((scales + 1) & 0x80) * 0xFC).to(tl.int16)
    return (numbers.to(tl.int16, bitcast=True) | is_nan).to(tl.float16, bitcast=True)


@triton.jit
def by_turns(first, second, SPAN: tl.constexpr):
    """SPAN columns of one tile [N, W, EACH], as many of the other, and so on. The columns of a word
    are in the registers of one thread: this takes no instruction."""
    column = tl.arange(0, first.shape[2])
    return tl.where((column // SPAN % 2 == 0)[None, None, :], first, second)


@triton.jit
def scales_by_ptx(words):
    """`scales_of` for whole words, with an instruction for two scales. SM89 is the first with
    it."""
    s0, s1, s2, s3 = tl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        .reg .b32 pair, factor;
        mov.b32 {low, high}, $4;
        mov.b32 factor, 0x58005800;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mul.rn.f16x2 pair, pair, factor;
        mov.b32 {$0, $1}, pair;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mul.rn.f16x2 pair, pair, factor;
        mov.b32 {$2, $3}, pair;
        }
        """,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16,) * 4,
        is_pure=True,
        pack=1,
    )
    s0, s1, s2, s3 = spread(s0, 4), spread(s1, 4), spread(s2, 4), spread(s3, 4)
    scales = by_turns(by_turns(s0, s1, 1), by_turns(s2, s3, 1), 2)
    return scales.reshape([words.shape[0], 4 * words.shape[1]])


@triton.jit
def scaled_by_ptx(words, scales):
    """`scaled` in PTX. The compiler would unpack the pairs, to multiply and to pack them again."""
    N: tl.constexpr = words.shape[0]
    SCALES: tl.constexpr = scales.shape[1]
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 up, left, right, even, odd, pair, scale;
        mov.b32 scale, {$9, $9};
        shl.b32 up, $8, 4;
        shl.b32 left, $8, 1;
        shr.u32 right, $8, 3;
        and.b32 left, left, 0x0E0E0E0E;
        and.b32 right, right, 0x0E0E0E0E;
        lop3.b32 even, up, 0x80808080, left, 0xEA;
        lop3.b32 odd, $8, 0x80808080, right, 0xEA;
        prmt.b32 pair, even, 0, 0x2404;
        mul.rn.f16x2 pair, pair, scale;
        mov.b32 {$0, $1}, pair;
        prmt.b32 pair, odd, 0, 0x2404;
        mul.rn.f16x2 pair, pair, scale;
        mov.b32 {$2, $3}, pair;
        and.b32 pair, even, 0xFF00FF00;
        mul.rn.f16x2 pair, pair, scale;
        mov.b32 {$4, $5}, pair;
        and.b32 pair, odd, 0xFF00FF00;
        mul.rn.f16x2 pair, pair, scale;
        mov.b32 {$6, $7}, pair;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
        [words.reshape([N, SCALES, 2]), scales[:, :, None]],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    v0, v1 = v0.reshape([N, 2 * SCALES]), v1.reshape([N, 2 * SCALES])
    v2, v3 = v2.reshape([N, 2 * SCALES]), v3.reshape([N, 2 * SCALES])
    v4, v5 = v4.reshape([N, 2 * SCALES]), v5.reshape([N, 2 * SCALES])
    v6, v7 = v6.reshape([N, 2 * SCALES]), v7.reshape([N, 2 * SCALES])
    v0, v1, v2, v3 = spread(v0, 8), spread(v1, 8), spread(v2, 8), spread(v3, 8)
    v4, v5, v6, v7 = spread(v4, 8), spread(v5, 8), spread(v6, 8), spread(v7, 8)
    low = by_turns(by_turns(v0, v1, 1), by_turns(v2, v3, 1), 2)
    high = by_turns(by_turns(v4, v5, 1), by_turns(v6, v7, 1), 2)
    return by_turns(low, high, 4).reshape([N, SCALES, 16])


@triton.jit
def scaled(words, scales):
    """[N, SCALES, 16] float16: the values of words [N, 2 * SCALES], in the order of `real_columns`,
    times scales [N, SCALES]."""
    values = halves_of(pairs_of(words))
    return values.reshape([words.shape[0], scales.shape[1], 16]) * scales[:, :, None]


@triton.jit
def load_four_bits(
    base, row_stride, scale_base, scale_stride, rows, is_there,
    WIDTH: tl.constexpr, REAL_WIDTH: tl.constexpr, FIRST: tl.constexpr, CHECKED: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """[N, WIDTH] float16, to be multiplied by FACTOR: REAL_WIDTH columns from FIRST on of rows [N],
    in the order of `real_columns`, with 0 after them and, if CHECKED, where is_there [N] is
    False.

    base: the address of the words that hold column FIRST of row 0. scale_base: that of the first
    scales of row 0. Strides count words. FIRST and REAL_WIDTH are multiples of 16. HOW:
    BY_TRITON, BY_PTX or BY_PTX_OF_SM89.
    """
    SCALES: tl.constexpr = WIDTH // 16
    BEGIN: tl.constexpr = FIRST // 16 % 4
    SCALE_WORDS: tl.constexpr = (SCALES + 3) // 4
    REAL_SCALE_WORDS: tl.constexpr = (BEGIN + REAL_WIDTH // 16 + 3) // 4
    tl.static_assert(BEGIN == 0 or SCALE_WORDS == 1)
    words = load_words(
        base, rows, row_stride, is_there, WIDTH // VALUES, REAL_WIDTH // VALUES, CHECKED
    )
    scale_words = load_words(
        scale_base + FIRST // 64, rows, scale_stride, is_there, SCALE_WORDS, REAL_SCALE_WORDS,
        CHECKED,
    )  # fmt: skip
    if HOW == BY_PTX_OF_SM89 and SCALES >= 4:
        scales = scales_by_ptx(scale_words)
    else:
        scales = scales_of(scale_words, SCALES, BEGIN)
    values = scaled(words, scales) if HOW == BY_TRITON else scaled_by_ptx(words, scales)
    return values.reshape([rows.shape[0], WIDTH])
