"""The request table of vLLM's block tables."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput, RequestTable


class BlockTable(RequestTable):
    """The pages of every request, as an engine with a block table has them.

    `block_table` [size + 1, max_blocks] int32 holds the page of every `page_size` tokens. The
    engine writes it once a step. Slots are derived for the backends that read slots: from the first
    time that one asks for them, each `write` updates them too.
    """

    def __init__(
        self, size: int, max_blocks: int, *, page_size: int, device: torch.device | str
    ) -> None:
        """Room for `size` requests of at most `max_blocks` pages.

        Raises InvalidInput for a number below 1 and PoolExhausted when memory does not suffice.
        """
        InvalidInput.check_at_least(1, "page_size", page_size)
        super().__init__(size, max_blocks * page_size, device)
        self.page_size = page_size
        self.block_table = self._allocate(max_blocks, "columns")
        self._slots: torch.Tensor | None = None

    @property
    def req_to_token(self) -> torch.Tensor:
        if self._slots is None:
            # A tensor made in inference mode could not be written outside of it later
            with torch.inference_mode(False):
                self._slots = self._allocate(self.max_context_len, "columns")
                self._offsets = torch.arange(self.page_size, dtype=torch.int32, device=self.device)
            self._derive(self.block_table.shape[0], self.block_table.shape[1])
        return self._slots

    def columns_for(self, page_size: int) -> tuple[torch.Tensor, int]:
        if page_size == self.page_size:
            return self.block_table, page_size
        return super().columns_for(page_size)

    def write(self, blocks: torch.Tensor, max_len: int) -> None:
        """Take the pages [B, at least the pages of max_len] int of a step's requests, whose rows
        are 1 to B. max_len: tokens of the longest one, or more. Does not synchronise.

        Raises InvalidInput, before anything is written, for other shapes and dtypes, and for more
        requests or pages than there is room for.
        """
        width = -(-max_len // self.page_size)
        is_table = blocks.dim() == 2 and blocks.shape[1] >= width >= 0
        if not is_table or blocks.dtype not in (torch.int32, torch.int64):
            expected = f"int32 or int64 [B, at least {width}] for {max_len} tokens"
            raise InvalidInput(
                "blocks", got=f"{blocks.dtype} of shape {tuple(blocks.shape)}", expected=expected
            )
        rows = blocks.shape[0] + 1
        if rows > self.block_table.shape[0] or width > self.block_table.shape[1]:
            got = f"{rows - 1} requests of up to {max_len} tokens"
            expected = f"at most {self.size} of {self.max_context_len}"
            raise InvalidInput("blocks", got=got, expected=expected)
        self.block_table[1:rows, :width].copy_(blocks[:, :width])
        if self._slots is not None:
            self._derive(rows, width)

    def _derive(self, rows: int, width: int) -> None:
        """The slots of the first pages of the first rows but padding's."""
        assert self._slots is not None
        slots = self._slots.view(self.size + 1, -1, self.page_size)
        first = (self.block_table[1:rows, :width] * self.page_size).unsqueeze(-1)
        torch.add(first, self._offsets, out=slots[1:rows, :width])
