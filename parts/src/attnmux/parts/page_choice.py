"""Bounds, scores, choice and copies of pages (Quest, arXiv:2406.10774): the interface of kernels,
the memory of the bounds, and the same in plain torch, which runs on any device and defines the
kernels' results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from attnmux.core import KVPool

KVBuffers = tuple[torch.Tensor, torch.Tensor]
"""K [slots, Hkv, D] and V [slots, Hkv, Dv] of a pool without gaps."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestPages:
    """The pages of a step's requests."""

    FIRST: ClassVar = 1
    """Pages at the start of a sequence that are always read: they hold attention sinks."""
    LAST: ClassVar = 2
    """Pages at the end that are always read. The last one may have a single token."""

    table: torch.Tensor
    """[rows, max_context] int32, the request table."""
    rows: torch.Tensor
    """[B] int64, those of the requests."""
    lens: torch.Tensor
    """[B] int32, tokens of each request."""
    page_size: int
    width: int
    """Pages of a request that are looked at: as many as the longest one has, or more."""

    @property
    def counts(self) -> torch.Tensor:
        """[B], pages of each request."""
        return (self.lens + (self.page_size - 1)) // self.page_size

    @property
    def pages(self) -> torch.Tensor:
        """[B, width] int64, their numbers; beyond a request's last page, those of others."""
        table = self.table[:, :: self.page_size]
        return table[self.rows, : self.width].long() // self.page_size

    @staticmethod
    def of_budget(budget: int, *, page_size: int, max_context_len: int) -> int:
        """Pages of each request that a step reads: a budget of tokens, or a whole request if
        fewer."""
        return min(budget // page_size, -(-max_context_len // page_size))


class PageKernels(Protocol):
    """A device's own way, one launch each. Does not synchronise; shapes are static."""

    def widen(
        self, keys: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, loc: torch.Tensor
    ) -> None:
        """Take in the keys that were written to slots loc [T] int64, in any order.

        keys: [slots, Hkv, D]. lower, upper: [pages, Hkv, D], changed in place: a page whose first
        slot is among loc is bounded anew. Those of page 0, padding's, are not defined.
        """

    def score(
        self, q: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, requests: RequestPages
    ) -> torch.Tensor:
        """The scores [B, Hkv, width] float32 of the requests' pages, as `bound_products`.

        q: [B, Hq, D]. Infinite for pages that are always read, -inf beyond a request's last one.
        """

    def choose(self, scores: torch.Tensor, requests: RequestPages, number: int) -> torch.Tensor:
        """The places of the pages with the largest scores, ascending: [B, Hkv, number] int64.

        Which of equal scores count is not defined. If a request has fewer pages than `number`,
        places beyond its last page follow.
        """

    def copy(
        self, source: KVBuffers, target: KVBuffers, places: torch.Tensor, requests: RequestPages
    ) -> None:
        """Copy K and V of pages, by places [B, Hkv, n] among those of the requests.

        The n pages of request b begin at page 1 + b * n of the target. Places beyond a request's
        last page get undefined, finite values.
        """


def bound_products(q: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """For each KV head an upper bound of q.k over its query heads and a page's keys.

    q: [B, Hq, D]. lower, upper: [B, n, Hkv, D]. Returns [B, Hkv, n] float32: the sum over channels
    of max(q * lower, q * upper), at most, of the query heads that share the KV head.
    """
    heads = lower.shape[2]
    q = q.float().view(q.shape[0], heads, -1, q.shape[-1])
    # max(q * lower, q * upper) is q * upper where q > 0, else q * lower: two products
    products = torch.einsum("bhgc,bnhc->bhgn", q.clamp(min=0), upper.float())
    products += torch.einsum("bhgc,bnhc->bhgn", q.clamp(max=0), lower.float())
    return products.amax(2)


class PlainPages:
    """`PageKernels` in plain torch operations."""

    def widen(
        self, keys: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, loc: torch.Tensor
    ) -> None:
        page_size = len(keys) // len(lower)
        keys, pages = keys.index_select(0, loc), loc // page_size
        opened = pages.masked_fill(loc % page_size != 0, 0)
        index = pages.view(-1, 1, 1).expand_as(keys)
        for bounds, reduce in ((lower, "amin"), (upper, "amax")):
            bounds.index_copy_(0, opened, keys)
            bounds.scatter_reduce_(0, index, keys, reduce)

    def score(
        self, q: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, requests: RequestPages
    ) -> torch.Tensor:
        pages = requests.pages
        scores = bound_products(q, lower[pages], upper[pages])
        order = torch.arange(requests.width, device=q.device)
        count = requests.counts.view(-1, 1)
        always = (order < requests.FIRST) | (order >= count - requests.LAST)
        scores.masked_fill_(always.unsqueeze(1), torch.inf)
        return scores.masked_fill_((order >= count).unsqueeze(1), -torch.inf)

    def choose(self, scores: torch.Tensor, requests: RequestPages, number: int) -> torch.Tensor:
        return scores.topk(number, dim=-1, sorted=False).indices.sort(-1).values

    def copy(
        self, source: KVBuffers, target: KVBuffers, places: torch.Tensor, requests: RequestPages
    ) -> None:
        heads, page_size = places.shape[1], requests.page_size
        # Beyond a request's last page: slot 0, since old rows of the table name others' pages
        beyond = places >= requests.counts.view(-1, 1, 1)
        first = requests.table[requests.rows.view(-1, 1, 1), places * page_size].long()
        first = (first // page_size * page_size).masked_fill(beyond, 0)
        within = torch.arange(page_size, device=places.device).view(1, 1, -1, 1)
        # Rows of one head: [B, n, page_size, Hkv]
        rows = (first.transpose(1, 2).unsqueeze(2) + within) * heads
        rows = (rows + torch.arange(heads, device=places.device)).flatten()
        start = page_size * heads
        for buffer, copies in zip(source, target, strict=True):
            found = copies.view(-1, copies.shape[-1])[start : start + len(rows)]
            torch.index_select(buffer.view(-1, buffer.shape[-1]), 0, rows, out=found)


class PageBounds:
    """The element-wise smallest and largest K of each page, [pages, Hkv, D] for each layer.

    Pages are those of the KV pool, so that a shared prefix keeps its bounds. A page's first token
    replaces the bounds of its former owner, and each further token widens them: the bounds of a
    partly filled page are those of the keys that it has. They hold K as the pool stores it.
    """

    def __init__(
        self, pool: KVPool, layer_ids: Sequence[int], kernels: PageKernels | None = None
    ) -> None:
        """kernels: update the bounds; plain torch operations do if there are none.

        Raises PoolExhausted when memory does not suffice.
        """
        self._pool = pool
        self._kernels = PlainPages() if kernels is None else kernels
        pages = pool.num_slots // pool.page_size
        shapes = [(pages, *pool.get_key_buffer(layer_id).shape[1:]) for layer_id in layer_ids]
        what = f"bounds of {pages} pages in {len(shapes)} layers"
        buffers = KVPool.allocate_zeroed(
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
        return sum(bounds.nbytes for bounds in (*self._lower.values(), *self._upper.values()))

    def of(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lower and the upper bounds of a layer's pages, [pages, Hkv, D] each."""
        return self._lower[layer_id], self._upper[layer_id]

    def update(self, layer_id: int, loc: torch.Tensor) -> None:
        """Take in the keys that were written to slots loc [T] int64, in any order.

        By operations of static shape. The bounds of page 0, padding's, are not defined.
        """
        self._kernels.widen(self._pool.get_key_buffer(layer_id), *self.of(layer_id), loc)
