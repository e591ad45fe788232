"""Converts 8-bit keys and values to 16 bits between shared memory and registers.

The left operand of a product may be in registers: keys and values go there, queries and weights to
the right. The columns of a product's operands may have any order that is the same in both, and its
rows any order that is undone in the result. Both orders are chosen so that a thread's values are
adjacent and are read 4 bytes at a time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.constexpr_function
def keys_layout(num_keys: int, width: int) -> gl.DistributedLinearLayout:
    """The layout of a tile of keys: that of the left operand, except that a thread has columns 0 to
    3 of every 16 instead of 0, 1, 8 and 9. See `order_columns`."""
    columns = [[0, 1], [0, 2]]
    rows = [[8, 0], *([64 << i, 0] for i in range((num_keys // 64).bit_length() - 1))]
    rest = [[0, 16 << i] for i in range((width // 16).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([*columns, *rows, *rest], lanes, warps, [], [num_keys, width])


@gluon.constexpr_function
def values_layout(num_keys: int, width: int) -> gl.DistributedLinearLayout:
    """The layout of a tile of values, which are the left operand transposed: a thread has adjacent
    columns where the operand's rows are 8 and 64 apart. See `order_values`."""
    beside = [[0, 1 << i] for i in range((width // 64).bit_length())]
    lane = 1 << len(beside)
    keys = [[1, 0], *([8 << i, 0] for i in range((num_keys // 8).bit_length() - 1))]
    lanes = [[2, 0], [4, 0], [0, lane], [0, 2 * lane], [0, 4 * lane]]
    warps = [[0, 8 * lane], [0, 16 * lane]]
    return gl.DistributedLinearLayout([*beside, *keys], lanes, warps, [], [num_keys, width])


@gluon.jit
def order_columns(rows):
    """[M, D]: columns 0, 1, 4, 5, 8, 9, 12, 13 of every 16, then the others."""
    M: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    return rows.reshape([M, D // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([M, D])


@gluon.jit
def load_keys(tile, operand: gl.constexpr):
    """A tile of keys [N, D] as float16, in the order of `order_columns`."""
    keys = tile.load(keys_layout(tile.shape[0], tile.shape[1])).to(gl.float16)
    return gl.convert_layout(order_columns(keys), operand)


@gluon.jit
def load_values(tile, operand: gl.constexpr):
    """A tile of values [N, D] as float16 [D, N], in the order that `order_values` undoes."""
    N: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    values = tile.load(values_layout(N, D)).to(gl.float16)
    values = values.reshape([N, 4, 8, D // 64, 2]).permute([3, 1, 4, 2, 0]).reshape([D, N])
    return gl.convert_layout(values, operand)


@gluon.jit
def order_values(acc):
    """Undoes the order of `load_values` in a result [D, M]."""
    D: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    return acc.reshape([D // 64, 4, 2, 8, M]).permute([1, 3, 0, 2, 4]).reshape([D, M])


@gluon.jit
def store_halves(q, halves, by_row: gl.constexpr):
    """Store queries [M, D] as float16, each row divided by the power of 2 that brings it below 2.
    A bfloat16 loses bits only if it is 2**14 times smaller than its row's largest. Returns the
    divisors [M]."""
    D: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = q.load(layout).to(gl.float32)
    highest = gl.max(gl.abs(rows), 1)
    divisor = gl.exp2(gl.floor(gl.log2(gl.where(highest > 0, highest, 1.0))))
    halves.store(order_columns((rows / divisor[:, None]).to(gl.float16)))
    fence_async_shared()
    return gl.convert_layout(divisor, by_row)
