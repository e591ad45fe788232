"""The engine's view of a KV cache that is interleaved over ranks: its pool and its table."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput, KVPool, RequestTable
from attnmux.distributed.interleaving import Interleaving


class InterleavedKVPool(KVPool):
    """All ranks' slots; this rank's are in `own`.

    It has the size and the pages that the engine's allocator hands out. Only `zero` reaches this
    rank's memory: backends read `own`, in which slots have other numbers.
    """

    def __init__(self, own: KVPool, interleaving: Interleaving) -> None:
        """Raises InvalidInput for pages of another size and for 4-bit floats."""
        if own.page_size != interleaving.page_size:
            expected = f"pages of {interleaving.page_size} tokens"
            raise InvalidInput("own", got=f"pages of {own.page_size}", expected=expected)
        super().__init__(
            size=own.size * interleaving.size,
            page_size=interleaving.whole_page,
            dtype=own.dtype,
            layer_ids=own.layer_ids,
            device=own.device,
        )
        self.check_whole_bytes("ranks that interleave their KV")
        self.own = own
        self.interleaving = interleaving

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.own.nbytes

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise self._refusal()

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        raise self._refusal()

    def zero(self, slots: torch.Tensor | None = None) -> None:
        self.own.zero(None if slots is None else self.interleaving.mine(slots))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Raises InvalidInput: a token does not move to another rank."""
        raise InvalidInput("source", got="slots to move", expected="chains of drafts, or none")

    def _refusal(self) -> InvalidInput:
        got, expected = "a read of all ranks' slots", "one of `own`, this rank's"
        return InvalidInput("token_to_kv_pool", got=got, expected=expected)


class InterleavedTable(RequestTable):
    """The pages and slots of every request's tokens on this rank, derived from the engine's table.

    `follow` derives the rows of a step. Slots are derived for backends that read slots.
    """

    def __init__(self, engine: RequestTable, interleaving: Interleaving) -> None:
        """engine: holds the slots of all ranks."""
        self._blocks = -(-engine.max_context_len // interleaving.whole_page)
        super().__init__(engine.size, self._blocks * interleaving.page_size, engine.device)
        self._engine = engine
        self._interleaving = interleaving
        shape = (self.size + 1, self._blocks)
        self._block_table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._slots: torch.Tensor | None = None

    @property
    def req_to_token(self) -> torch.Tensor:
        if self._slots is None:
            with torch.inference_mode(False):
                shape = (self.size + 1, self.max_context_len)
                self._slots = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._slots.copy_(self._slots_of(self._block_table))
        return self._slots

    def columns_for(self, page_size: int) -> tuple[torch.Tensor, int]:
        if page_size == self._interleaving.page_size:
            return self._block_table, page_size
        return self.req_to_token, 1

    def follow(self, rows: torch.Tensor) -> None:
        """Take the pages of these rows [B] int64 from the engine's table. Does not synchronise."""
        whole = self._interleaving.whole_page
        pages = self._engine.req_to_token[:, ::whole].index_select(0, rows) // whole
        self._block_table.index_copy_(0, rows, pages)
        if self._slots is not None:
            self._slots.index_copy_(0, rows, self._slots_of(pages))

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """[rows, tokens] int32 of pages [rows, blocks] int32."""
        size = self._interleaving.page_size
        offsets = torch.arange(size, dtype=torch.int32, device=self.device)
        return (pages.unsqueeze(-1) * size + offsets).flatten(1)
