"""Which tokens of a request lie on which rank, and in which slots there.

An engine keeps one request table and one allocator for all ranks, in pages of `whole_page` tokens.
A page of the engine is a page of `page_size` tokens with the same number on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleaving:
    """The token at place i of its request lies on rank i // interleave % size.

    Raises InvalidInput for sizes below 1, a rank that the group does not have, and pages that are
    not whole runs of `interleave` tokens.
    """

    rank: int
    size: int
    page_size: int
    """Tokens of a page on one rank."""
    interleave: int = 1
    """Successive tokens on one rank."""

    def __post_init__(self) -> None:
        for name in ("size", "page_size", "interleave"):
            InvalidInput.check_at_least(1, name, getattr(self, name))
        if not 0 <= self.rank < self.size:
            raise InvalidInput("rank", got=self.rank, expected=f"0 to {self.size - 1}")
        if self.page_size % self.interleave:
            expected = f"a divisor of the page size, {self.page_size}"
            raise InvalidInput("interleave", got=self.interleave, expected=expected)

    @property
    def whole_page(self) -> int:
        """Tokens of a page of all ranks, which is a page of the engine."""
        return self.page_size * self.size

    def lens(
        self, lens: torch.Tensor, start: torch.Tensor | int = 0, *, rank: int | None = None
    ) -> torch.Tensor:
        """How many of the places from `start` to `start + lens` lie on a rank, by default this
        one. int of any shape."""
        rank = self.rank if rank is None else rank
        return self._before(start + lens, rank) - self._before(start, rank)

    def owners(self, slots: torch.Tensor) -> torch.Tensor:
        """The rank of each slot of the engine, int of any shape. Places in a request have the same
        owners, since its pages are whole."""
        return slots // self.interleave % self.size

    def local(self, slots: torch.Tensor) -> torch.Tensor:
        """Where each slot of the engine lies on the rank that owns it."""
        run = self.interleave
        return slots // (run * self.size) * run + slots % run

    def mine(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots on this rank, and 0, which is padding's, for those of other ranks."""
        return torch.where(self.owners(slots) == self.rank, self.local(slots), 0)

    def _before(self, place: torch.Tensor | int, rank: int) -> torch.Tensor:
        """How many places before this one lie on the rank."""
        run, cycle = self.interleave, self.interleave * self.size
        place = torch.as_tensor(place)
        return place // cycle * run + (place % cycle - rank * run).clamp(0, run)
