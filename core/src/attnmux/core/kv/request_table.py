"""Request tables that hold slots by token or pages, with their free rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.contract.arguments import check_vector, described
from attnmux.core.contract.tables import RequestTable
from attnmux.core.facts.errors import InvalidInput, PoolExhausted


class ReqToTokenPool(RequestTable):
    """The request table and its free rows. Row 0 is never handed out, and a row keeps its old slots
    after `free`."""

    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        """Room for `size` requests of at most `max_context_len` tokens.

        Raises InvalidInput for a size below 1 and PoolExhausted when memory does not suffice.
        """
        super().__init__(size, max_context_len, device)
        self._available: int = size
        self._req_to_token = self._allocate(max_context_len, "tokens")
        self.clear()

    def available_size(self) -> int:
        """Free rows."""
        return self._available

    def alloc(self, num_requests: int) -> list[int]:
        """Rows for new requests.

        Python ints, since schedulers keep one for each request; a batch's `req_pool_indices` is an
        int64 tensor of them.
        Raises PoolExhausted, changing nothing, when fewer rows are free.
        """
        InvalidInput.check_at_least(0, "num_requests", num_requests)
        rest = self._available - num_requests
        if rest < 0:
            raise PoolExhausted(
                "request table rows",
                wanted=num_requests,
                available=self._available,
                hint="finish requests first or make the table larger",
            )
        rows = self._stack[rest : self._available][::-1]
        self._available = rest
        for row in rows:
            self._in_use[row] = True
        return rows

    def free(self, rows: Sequence[int]) -> None:
        """Give rows back.

        Raises InvalidInput, changing nothing, for a row that is not in use or is given twice.
        """
        distinct = set(rows)
        foreign = sorted(
            row for row in distinct if not (0 < row <= self.size and self._in_use[row])
        )
        if foreign:
            raise InvalidInput("rows", got=f"rows {foreign}", expected="rows in use")
        if len(distinct) != len(rows):
            raise InvalidInput("rows", got=f"{list(rows)}", expected="each row once")
        end = self._available + len(rows)
        self._stack[self._available : end] = reversed(rows)
        self._available = end
        for row in rows:
            self._in_use[row] = False

    def mark(self) -> int:
        """The state that `rewind` returns to. It holds until the next `free`."""
        return self._available

    def rewind(self, mark: int) -> None:
        """Undo every `alloc` since `mark`. Nothing may have been freed since."""
        for row in self._stack[self._available : mark]:
            self._in_use[row] = False
        self._available = mark

    def clear(self) -> None:
        """Free every row."""
        self._stack = list(range(self.size, 0, -1))
        self._in_use = [False] * (self.size + 1)
        self._available = self.size

    def write(
        self,
        req_pool_indices: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> None:
        """Record the slots of new tokens.

        req_pool_indices: [B] int64 rows. starts: [B] int, column of each request's first new
        token. lens: [B] int, new tokens a request; None means one each (decode).
        slots: [T] int64 in request order, T the sum of lens, as the allocators return them.
        Does not synchronise. Values are checked on a CPU only; elsewhere the scheduler must keep a
        request within its row.
        Raises InvalidInput, before anything is written, for arguments that do not fit together.
        """
        batch_size = check_vector("req_pool_indices", req_pool_indices, torch.int64)
        num_tokens = check_vector("slots", slots, torch.int64)
        for argument, values in (("starts", starts), ("lens", starts if lens is None else lens)):
            if values.shape != (batch_size,) or values.dtype not in (torch.int32, torch.int64):
                expected = f"int32 or int64 of shape ({batch_size},), one a row"
                raise InvalidInput(argument, got=described(values), expected=expected)
        if self.device.type == "cpu" and batch_size:
            counts = torch.ones_like(starts) if lens is None else lens
            self._check_cells(req_pool_indices, starts, counts, num_tokens)
        cells = req_pool_indices * self.max_context_len + starts
        if lens is not None:
            cells = (cells - (lens.cumsum(0) - lens)).repeat_interleave(
                lens, output_size=num_tokens
            )
            cells += torch.arange(num_tokens, device=cells.device)
        self.req_to_token.view(-1).index_copy_(0, cells, slots.to(torch.int32))

    def _check_cells(
        self, rows: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, num_tokens: int
    ) -> None:
        if int(rows.min()) < 1 or int(rows.max()) > self.size:
            expected = f"rows 1 to {self.size}"
            raise InvalidInput("req_pool_indices", got=f"{rows.tolist()}", expected=expected)
        if int(lens.min()) < 0 or int(lens.sum()) != num_tokens:
            expected = f"a sum of {num_tokens}, one slot each"
            raise InvalidInput("lens", got=f"{lens.tolist()}", expected=expected)
        if int(starts.min()) < 0 or int((starts + lens).max()) > self.max_context_len:
            got = f"{starts.tolist()} with lens {lens.tolist()}"
            raise InvalidInput("starts", got=got, expected=f"columns < {self.max_context_len}")
