"""Quest's page representations: bounds of the keys of each page (arXiv:2406.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnmux.core.kv.memory import allocate_zeroed

if TYPE_CHECKING:
    from attnmux.core.kv import KVPool


class PageBounds:
    """The element-wise smallest and largest K of each page, [pages, Hkv, D] for each layer.

    Pages are those of the KV pool, so that a shared prefix keeps its bounds. A page's first token
    replaces the bounds of its former owner, and each further token widens them: a page that is
    partly filled is bounded as far as it is filled. They hold K as the pool stores it.
    """

    def __init__(self, pool: KVPool, layer_ids: Sequence[int]) -> None:
        """Raises PoolExhausted when memory does not suffice."""
        self._pool = pool
        pages = pool.num_slots // pool.page_size
        shapes = [(pages, *pool.get_key_buffer(each).shape[1:]) for each in layer_ids]
        what = f"bounds of {pages} pages in {len(shapes)} layers"
        buffers = allocate_zeroed(
            shapes * 2,
            dtype=pool.dtype,
            device=pool.device,
            what=what,
            hint="lower the number of tokens",
        )
        self._lower = dict(zip(layer_ids, buffers[: len(shapes)], strict=True))
        self._upper = dict(zip(layer_ids, buffers[len(shapes) :], strict=True))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self._lower.values(), *self._upper.values()))

    def of(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lower and the upper bounds of a layer's pages, [pages, Hkv, D] each."""
        return self._lower[layer_id], self._upper[layer_id]

    def update(self, layer_id: int, loc: torch.Tensor) -> None:
        """Take in the keys that were written to slots loc [T] int64, in any order.

        By operations of static shape. The bounds of page 0, padding's, are not defined.
        """
        keys = self._pool.get_key_buffer(layer_id).index_select(0, loc)
        pages = loc // self._pool.page_size
        opened = pages.masked_fill(loc % self._pool.page_size != 0, 0)
        index = pages.view(-1, 1, 1).expand_as(keys)
        for bounds, reduce in ((self._lower, "amin"), (self._upper, "amax")):
            bounds[layer_id].index_copy_(0, opened, keys)
            bounds[layer_id].scatter_reduce_(0, index, keys, reduce)

    def scores(self, layer_id: int, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """For each KV head an upper bound of q.k over its query heads and a page's keys.

        q: [B, Hq, D]. pages: [B, n] int64. Returns [B, Hkv, n] float32: the sum over channels of
        max(q * lower, q * upper), at most, of the query heads that share the KV head.
        """
        lower, upper = (each[pages].float() for each in self.of(layer_id))
        heads = lower.shape[2]
        q = q.float().view(q.shape[0], heads, -1, q.shape[-1])
        # max(q * lower, q * upper) is q * upper where q > 0, else q * lower: two products
        found = torch.einsum("bhgc,bnhc->bhgn", q.clamp(min=0), upper)
        found += torch.einsum("bhgc,bnhc->bhgn", q.clamp(max=0), lower)
        return found.amax(2)
