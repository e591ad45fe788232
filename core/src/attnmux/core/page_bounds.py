"""Quest's page representations: bounds of the keys of each page (arXiv:2406.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnmux.core.kv.memory import allocate_zeroed
from attnmux.core.page_choice import PlainPages

if TYPE_CHECKING:
    from attnmux.core.kv import KVPool
    from attnmux.core.page_choice import PageKernels


class PageBounds:
    """The element-wise smallest and largest K of each page, [pages, Hkv, D] for each layer.

    Pages are those of the KV pool, so that a shared prefix keeps its bounds. A page's first token
    replaces the bounds of its former owner, and each further token widens them: the bounds of a
    partly filled page are those of the keys that it has. They hold K as the pool stores it.
    """

    def __init__(
        self, pool: KVPool, layer_ids: Sequence[int], kernels: PageKernels | None = None
    ) -> None:
        """kernels: update the bounds; plain torch operations do where there are none.

        Raises PoolExhausted when memory does not suffice.
        """
        self._pool = pool
        self._kernels = PlainPages() if kernels is None else kernels
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

    @staticmethod
    def bytes_per_page(
        *, dtype: torch.dtype, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> int:
        """Bytes of one page's bounds in all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

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
        self._kernels.widen(self._pool.get_key_buffer(layer_id), *self.of(layer_id), loc)
