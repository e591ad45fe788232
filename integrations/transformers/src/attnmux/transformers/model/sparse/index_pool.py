"""The keys of sparse attention's indexer, in the slots of a KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import InvalidInput, KVPool
from attnmux.core.plugin import IndexRows, check_tensor

BLOCK = 128
"""Values of a key that share a scale, as in DeepSeek-V3.2's indexer."""
FP8 = torch.float8_e4m3fn


class IndexKPool:
    """[slots, index_head_dim] of each layer that has an indexer, zero until written.

    Its slots are those of the request table, so that a shared prefix keeps its keys and the
    allocator of the KV pool counts both. A step writes a token's key before anything scores it, and
    no token scores keys after its own, so that pages need not be zeroed before they are freed.

    In e4m3 a key is stored divided by a float32 scale for each block of 128 values, which is the
    block's largest value over 448. A value's error is at most 1/16 of it, or half of e4m3's
    smallest step times the scale. `KeyPicker` writes keys, and scores queries, `rotated` as in
    DeepSeek-V3.2's inference code. A score's error is then at most (1/16 + sqrt(index_head_dim) *
    2**-10 / 448) times the sum over heads of |weight| * ||query|| * ||key||, plus the rounding of
    rotated queries to their dtype.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        dtype: torch.dtype,
        layer_ids: Sequence[int],
        head_dim: int,
        device: torch.device | str,
    ) -> None:
        """num_slots: as many as the KV pool's, the reserved page included.

        Raises InvalidInput for impossible sizes and dtypes, PoolExhausted when memory is short.
        """
        InvalidInput.check_at_least(1, "num_slots", num_slots)
        InvalidInput.check_at_least(1, "head_dim", head_dim)
        if dtype not in (torch.bfloat16, torch.float16, torch.float32, FP8):
            expected = "bfloat16, float16, float32 or float8_e4m3fn"
            raise InvalidInput("dtype", got=dtype, expected=expected)
        self.num_slots = num_slots
        self.dtype = dtype
        self.head_dim = head_dim
        self.device = torch.device(device)
        self.layer_ids = tuple(layer_ids)
        what = f"index keys of {num_slots} slots in {len(self.layer_ids)} layers"
        hint = "lower the number of tokens"
        self._keys = self._allocate((num_slots, head_dim), dtype, what, hint)
        self._rotation: torch.Tensor | None = None
        self._scales: dict[int, torch.Tensor] = {}
        if dtype == FP8:
            shape = (num_slots, -(-head_dim // BLOCK))
            self._scales = self._allocate(shape, torch.float32, what, hint)
            if head_dim & (head_dim - 1) == 0:
                self._rotation = hadamard(head_dim, device=self.device)

    def _allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, what: str, hint: str
    ) -> dict[int, torch.Tensor]:
        shapes = [shape] * len(self.layer_ids)
        buffers = KVPool.allocate_zeroed(
            shapes, dtype=dtype, device=self.device, what=what, hint=hint
        )
        return dict(zip(self.layer_ids, buffers, strict=True))

    @staticmethod
    def bytes_per_token(*, dtype: torch.dtype, num_layers: int, head_dim: int) -> int:
        """Bytes of one token in all layers."""
        scales = 4 * -(-head_dim // BLOCK) if dtype == FP8 else 0
        return num_layers * (head_dim * dtype.itemsize + scales)

    @property
    def nbytes(self) -> int:
        return sum(key.nbytes for key in (*self._keys.values(), *self._scales.values()))

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., index_head_dim] of queries or keys as they are multiplied. In an e4m3 pool
        whose index_head_dim is a power of 2, `hadamard` turns them, which changes products of
        queries and keys only by rounding. Other rows stay as they are."""
        if self._rotation is None:
            return rows
        return (rows.float() @ self._rotation).to(rows.dtype)

    def set_keys(self, layer_id: int, loc: torch.Tensor, keys: torch.Tensor) -> None:
        """Write keys [T, index_head_dim] to slots loc [T] int64. Does not synchronise.

        Raises InvalidInput for a layer without an indexer, and for wrong shapes and dtypes.
        """
        buffer = self._keys[self._checked(layer_id)]
        check_tensor("loc", loc, ("T",), None, torch.int64)
        shape = (len(loc), self.head_dim)
        check_tensor("keys", keys, shape, loc.device, *KVPool.ACTIVATION_DTYPES)
        keys = keys.detach()
        if self.dtype == FP8:
            keys, scales = _quantised(keys)
            self._scales[layer_id].index_copy_(0, loc, scales)
        # Rows have one head
        KVPool.scatter_rows(buffer.unsqueeze(1), loc, keys.to(self.dtype).contiguous().unsqueeze(1))

    def keys(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """The keys [..., index_head_dim] float32 of slots [...] int64, as they are stored.

        Raises InvalidInput for a layer without an indexer.
        """
        rows = KVPool.gather_rows(self._keys[self._checked(layer_id)], slots).float()
        if self.dtype != FP8:
            return rows
        scales = self._scales[layer_id][slots].repeat_interleave(BLOCK, dim=-1)
        return rows * scales[..., : self.head_dim]

    def rows(self, layer_id: int) -> IndexRows:
        """The memory of a layer's keys. Raises InvalidInput for a layer without an indexer."""
        keys = self._keys[self._checked(layer_id)]
        return IndexRows(keys=keys, scales=self._scales.get(layer_id))

    def _checked(self, layer_id: int) -> int:
        if layer_id not in self._keys:
            expected = f"one of {list(self.layer_ids)}"
            raise InvalidInput("layer_id", got=layer_id, expected=expected)
        return layer_id


def _quantised(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [T, D] in e4m3, scales [T, blocks] float32) of keys [T, D]."""
    head_dim = keys.shape[1]
    blocks = torch.nn.functional.pad(keys.float(), (0, -head_dim % BLOCK))
    blocks = blocks.view(len(keys), -1, BLOCK)
    largest = torch.finfo(FP8).max
    # A block of zeros has any scale
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / largest
    values = (blocks / scales.unsqueeze(-1)).clamp(-largest, largest)
    return values.flatten(1)[:, :head_dim].to(FP8), scales


def hadamard(size: int, *, device: torch.device | str) -> torch.Tensor:
    """Sylvester's matrix of 1 and -1 over the root of its size, [size, size] float32: orthogonal
    and symmetric. It spreads a large value over a whole row, before rows are rounded to 8 bits.

    Raises InvalidInput unless the size is a power of 2.
    """
    if size < 1 or size & (size - 1):
        raise InvalidInput("size", got=size, expected="a power of 2")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.mul(float(size) ** -0.5).to(device)
