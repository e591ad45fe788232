"""The constants of `tiles`, and the rows and keys of each program."""

# No annotations as strings: an aggregate reads those of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from attnmux.triton.kernels import blocks

part_of_range = gluon.jit(blocks.part_of_range.fn)
visible_range = gluon.jit(blocks.visible_range.fn)


@aggregate
class Kind:
    """The constants of a kernel, named like its arguments."""

    GROUP: gl.constexpr
    D: gl.constexpr
    """Columns of the first part of a row, of K and of V."""
    K_TAIL: gl.constexpr
    """Columns of the second part, 0 without one."""
    V_TAIL: gl.constexpr
    PAGE: gl.constexpr
    IS_CAUSAL: gl.constexpr
    IS_CROSS: gl.constexpr
    IN_CALL: gl.constexpr
    HAS_ENCODER: gl.constexpr
    WINDOW: gl.constexpr
    CHUNK: gl.constexpr
    HAS_CAP: gl.constexpr
    SPLIT_BLOCKS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    ROUNDS_QUERIES: gl.constexpr
    """Whether queries are rounded to K's 8 bits, and a row's logits have a scale of their own."""
    ROUNDS_WEIGHTS: gl.constexpr
    """Whether weights are rounded to V's 8 bits, and V comes in blocks of columns: see `turn`."""

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


@aggregate
class Tile:
    """Rows of one KV head's queries, and the keys that they see."""

    kv_head: gl.tensor
    request: gl.tensor
    q_begin: gl.tensor
    """The request's first token among the step's."""
    first_row: gl.tensor
    num_rows: gl.tensor
    """Rows of the request: query heads of the KV head times new tokens."""
    cached: gl.tensor
    """The position of its first new token."""
    num_keys: gl.tensor
    start: gl.tensor
    """The first block of keys that is read."""
    stop: gl.tensor
    """One past the last."""
    whole_start: gl.tensor
    """From here to `whole_stop`, every row sees every key."""
    whole_stop: gl.tensor

    @gluon.constexpr_function
    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)


@gluon.jit
def place_tile(
    cached_lens,
    encoder_lens,
    q_indptr,
    tile_request,
    tile_row,
    batch_size,
    num_tokens,
    num_tiles,
    num_splits,
    kind,
):
    """The program's tile. One of no request has neither rows nor keys."""
    tile = num_tiles - 1 - gl.program_id(1)
    request = gl.load(tile_request + tile)
    first_row = gl.load(tile_row + tile)
    is_tile = request >= 0
    is_request = is_tile & (request < batch_size)
    q_begin = gl.load(q_indptr + request, mask=is_tile, other=0)
    q_end = gl.load(q_indptr + request + 1, mask=is_request, other=num_tokens)
    q_len = gl.where(is_tile, q_end - q_begin, 0)
    cached = gl.to_tensor(0)
    if not kind.IN_CALL:
        cached = gl.load(cached_lens + request, mask=is_request, other=0)
    if kind.IS_CROSS:
        num_keys = gl.load(encoder_lens + request, mask=is_request, other=0)
    else:
        num_keys = gl.where(is_request, cached + q_len, 0)
    num_rows = q_len * kind.GROUP
    last_row = gl.minimum(first_row + kind.BLOCK_M, num_rows) - 1
    low, least_end = visible_range(
        cached + first_row // kind.GROUP, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK
    )
    last_first, high = visible_range(
        cached + last_row // kind.GROUP, num_keys, kind.IS_CAUSAL, kind.WINDOW, kind.CHUNK
    )
    start = low // kind.BLOCK_N
    stop = gl.maximum(gl.cdiv(gl.minimum(high, num_keys), kind.BLOCK_N), start)
    if kind.SPLIT_BLOCKS > 0:
        start, stop = part_of_range(
            start, stop, gl.program_id(2), num_splits, kind.SPLIT_BLOCKS
        )  # fmt: skip
    whole_start = gl.minimum(gl.maximum(gl.cdiv(last_first, kind.BLOCK_N), start), stop)
    whole_stop = gl.minimum(gl.maximum(least_end // kind.BLOCK_N, whole_start), stop)
    return Tile(
        kv_head=gl.program_id(0),
        request=request,
        q_begin=q_begin,
        first_row=first_row,
        num_rows=num_rows,
        cached=cached,
        num_keys=num_keys,
        start=start,
        stop=stop,
        whole_start=whole_start,
        whole_stop=whole_stop,
    )
