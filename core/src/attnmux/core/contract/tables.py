"""The request table as backends read it: the slots of every request's tokens."""

from __future__ import annotations

import torch

from attnmux.core.contract.memory import allocate_zeroed
from attnmux.core.facts.errors import InvalidInput


class RequestTable:
    """The slots of every request's tokens, as backends read them.

    Row 0 belongs to padding: its slots are 0. The lengths of a batch say how many of a row's slots
    are valid.
    """

    _req_to_token: torch.Tensor
    """Set by a subclass, unless it derives slots."""

    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        """Raises InvalidInput for a size or a length below 1."""
        InvalidInput.check_at_least(1, "size", size)
        InvalidInput.check_at_least(1, "max_context_len", max_context_len)
        self.size: int = size
        """Rows for requests, without padding's."""
        self.max_context_len = max_context_len
        self.device = torch.device(device)

    @property
    def req_to_token(self) -> torch.Tensor:
        """[size + 1, max_context_len] int32, at a fixed address: the slot of every token."""
        return self._req_to_token

    def columns_for(self, page_size: int) -> tuple[torch.Tensor, int]:
        """A table [size + 1, width] int32 at a fixed address, and the tokens of a column: 1, if
        it holds slots, or `page_size`, if it holds pages of that size.

        Index builders take the request table itself and read this. A backend that wants pages
        then reads them if the engine keeps pages.
        """
        return self.req_to_token, 1

    def _allocate(self, columns: int, what: str) -> torch.Tensor:
        """A zeroed [size + 1, columns] int32. Raises PoolExhausted, which calls columns `what`."""
        (table,) = allocate_zeroed(
            [(self.size + 1, columns)],
            dtype=torch.int32,
            device=self.device,
            what=f"request table of {self.size} requests of {columns} {what}",
            hint="lower the number of requests or the context length",
        )
        return table
