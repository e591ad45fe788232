"""Keys that each stand for a block of tokens, and the rows they are made from, in the slots of a KV
pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput, KVPool, foreign_pool
from attnmux.transformers.model.sparse.index_pool import IndexKPool


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CompressedShape:
    """Sizes that layers have in common. Raises InvalidInput for impossible sizes."""

    block_size: int
    """Tokens that a key stands for."""
    num_blocks: int
    """Blocks that a key is made of: its own, and those just before it."""
    row_dim: int
    """Values that are kept of each token until the last key is made of them."""
    head_dim: int
    """Dim of a key, which is its value too."""
    index_dim: int = 0
    """Dim of the keys of an indexer; 0 without one."""
    topk: int = 0
    """Keys that the indexer picks for each token; 0: a token sees all up to it."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "row_dim", "head_dim"):
            InvalidInput.check_at_least(1, name, getattr(self, name))
        if (self.topk > 0) != (self.index_dim > 0):
            got, expected = f"{self.topk} keys of {self.index_dim} dims", "both, or neither"
            raise InvalidInput("topk", got=got, expected=expected)

    @property
    def earlier_tokens(self) -> int:
        """Tokens before the last one of a block whose rows its key is made of."""
        return self.num_blocks * self.block_size - 1

    def tokens_a_slot(self, page_size: int) -> int:
        """Tokens of a KV pool that share a slot for a key. They are in one page, and no two blocks
        end among them."""
        return math.gcd(page_size, self.block_size)


class CompressedPool:
    """A key is at the slot of its block's last token. So a request that begins with another
    request's tokens has their keys, and the allocator of the KV pool counts both.

    Rows lie in slots of the layers' own buffers: a pool of windows keeps them as long as K and V.
    Keys and rows are written before a token sees them, so that pages need not be zeroed before they
    are freed.
    """

    def __init__(
        self, shape: CompressedShape, *, pool: KVPool, dtype: torch.dtype, layer_ids: Sequence[int]
    ) -> None:
        """pool: of the layers, which share one buffer size. dtype: of the model.

        Raises InvalidInput for a pool of 4-bit floats, PoolExhausted when memory is short.
        """
        self.shape = shape
        self.layer_ids = tuple(layer_ids)
        self.tokens_a_slot = shape.tokens_a_slot(pool.page_size)
        self._pool = pool
        self.keys = self._key_pool(shape.head_dim)
        """Keys, which are their own values, by `key_slots`: [slots, 1, D] of each layer, zero until
        written."""
        own_slots = pool.get_key_buffer(self.layer_ids[0]).shape[0]
        self.rows = self._vectors(own_slots, shape.row_dim, dtype)
        """The row of each token, by `own_slots`."""
        self.index_keys: IndexKPool | None = None
        if shape.index_dim:
            self.index_keys = self._vectors(self.keys.num_slots, shape.index_dim, dtype)

    def _key_pool(self, head_dim: int) -> KVPool:
        pool, page_size = self._pool, self._pool.page_size // self.tokens_a_slot
        pool.check_whole_bytes("keys of blocks")
        slots = pool.size // self.tokens_a_slot + page_size
        buffers = KVPool.allocate_zeroed(
            [(slots, 1, head_dim)] * len(self.layer_ids),
            dtype=pool.dtype,
            device=pool.device,
            what=f"keys of blocks of {pool.size} tokens in {len(self.layer_ids)} layers",
            hint="lower the number of tokens (size) or take a smaller KV dtype",
        )
        pairs = {key: (each, each) for key, each in zip(self.layer_ids, buffers, strict=True)}
        return foreign_pool(pairs, page_size=page_size)

    def _vectors(self, num_slots: int, dim: int, dtype: torch.dtype) -> IndexKPool:
        return IndexKPool(
            num_slots=num_slots,
            dtype=dtype,
            layer_ids=self.layer_ids,
            head_dim=dim,
            device=self._pool.device,
        )

    def own_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots, in the layers' own buffer, of tokens in slots of the request table."""
        return self._pool.translate(slots, self.layer_ids[0])

    def key_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of keys whose last tokens are in slots of the request table."""
        return slots // self.tokens_a_slot

    @property
    def nbytes(self) -> int:
        index = 0 if self.index_keys is None else self.index_keys.nbytes
        return self.rows.nbytes + self.keys.nbytes + index

    @staticmethod
    def bytes_per_token(
        shape: CompressedShape,
        *,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_layers: int,
    ) -> tuple[int, int]:
        """Bytes of one token in so many layers: of its keys, and of its row."""
        of_key = shape.head_dim * kv_dtype.itemsize + shape.index_dim * dtype.itemsize
        keys = -(-num_layers * of_key // shape.tokens_a_slot(page_size))
        return keys, num_layers * shape.row_dim * dtype.itemsize
