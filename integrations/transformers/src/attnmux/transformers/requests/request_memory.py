"""The rows and slots of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from attnmux.core import InvalidInput, KVPool, ReqToTokenPool
from attnmux.parts import LinearStatePool
from attnmux.transformers.requests.prefixes import PrefixTree, StatePrefixTree, WindowPrefixTree
from attnmux.transformers.requests.prompt_images import check_images
from attnmux.transformers.requests.sequence import SequenceState, check_encoder_states
from attnmux.transformers.requests.slots import PagedAllocator


class SlotStates(Protocol):
    """Rows next to the K and V of tokens, one a slot: a model's hidden states."""

    states: torch.Tensor
    """[slots, width]"""

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, width]: those of slots [n]."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy those of slots [n] to others."""


class RequestMemory:
    """The request table and the allocator, which change together.

    If a signal interrupts the accounting itself, `intact` stays False until `reset`.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: PagedAllocator,
        *,
        token_to_kv_pool: KVPool | None = None,
        window_tree: WindowPrefixTree | None = None,
        state_tree: StatePrefixTree | None = None,
        max_encoder_len: int = 0,
        encoder_like: torch.Tensor | None = None,
        image_width: int = 0,
        linear_states: LinearStatePool | None = None,
        hidden: SlotStates | None = None,
    ) -> None:
        """token_to_kv_pool: holds the slots' K and V; None without any to zero.

        window_tree: an empty tree on `allocator`, for a model with a window pool. Callers then
        `slide` requests before they build steps.
        state_tree: an empty tree on `allocator`, for a model whose linear layers' states are kept.
        max_encoder_len: the most encoder tokens of a request. Every row of the table has columns
        for them before its tokens. 0 for a decoder-only model.
        encoder_like: as in `check_encoder_states`. image_width: as in `check_images`.
        linear_states: those of the model's linear layers, in the rows of the table.
        hidden: the hidden states of the slots' tokens; None for a model that keeps none.

        `prefix_tree` starts empty and is for the caller. It owns slots of the allocator and lives
        as long as that.
        """
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.intact = True
        """Whether rows and pages are accounted for. False while a method changes them."""
        self.token_to_kv_pool = token_to_kv_pool
        own_tree = window_tree or state_tree
        self.prefix_tree = own_tree or PrefixTree(allocator)
        self.window_tree = window_tree
        """The prefix tree, if the model has a window pool."""
        self.state_tree = state_tree
        """The prefix tree, if the states of linear layers are kept."""
        self.max_encoder_len = max_encoder_len
        self._encoder_like, self._image_width = encoder_like, image_width
        self.linear_states = linear_states
        self.hidden = hidden

    def reset(self) -> None:
        """Free all rows and pages, empty the prefix tree and zero the KV pool. Requests that held
        rows must `forget` them."""
        self.intact = False
        self.allocator.clear()
        self.req_to_token_pool.clear()
        self.prefix_tree.reset()
        if self.token_to_kv_pool is not None:
            self.token_to_kv_pool.zero()
        self.intact = True

    @property
    def device(self) -> torch.device:
        return self.allocator.device

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest request, without its encoder's."""
        return self.req_to_token_pool.max_context_len - self.max_encoder_len

    def check_encoder_states(self, states: object) -> None:
        """Raise InvalidInput for a request's encoder states that its steps could not read."""
        check_encoder_states(states, self.max_encoder_len, self._encoder_like)

    def check_images(self, images: object) -> None:
        """Raise InvalidInput for images of a prompt that its steps could not read."""
        check_images(images, self._image_width)

    def taking(self) -> Taking:
        """A block that takes rows and pages and frees none.

        If the block raises, the rows and pages that it took are free again. Otherwise its caller
        records the new owners and sets `intact`. Raises InvalidInput after an interrupted change.
        """
        if not self.intact:
            got = "pools that an interrupted change left undefined"
            raise InvalidInput("steps", got=got, expected="a call of reset() first")
        return Taking(self)

    def adopt(self, state: SequenceState, slots: torch.Tensor) -> None:
        """Give a new request a row that begins with the shared slots [n] int64, whole pages.

        Raises PoolExhausted, changing nothing, without a free row.
        """
        with self.taking():
            (row,) = self.req_to_token_pool.alloc(1)
            self._write(row, 0, slots)
        state.row, state.num_cached, state.num_shared = row, slots.shape[0], slots.shape[0]
        self.intact = True

    def extend_rows(
        self, rows: torch.Tensor, columns: Sequence[torch.Tensor], columns_cpu: torch.Tensor
    ) -> torch.Tensor:
        """Slots for the new tokens of each request, written to its columns from start to stop.

        rows: [B] int64. columns: starts and stops, [B] int64 each; columns_cpu: both on the host.
        Call it while `taking`.
        """
        starts, stops = columns
        slots = self.allocator.alloc_extend(
            starts,
            stops,
            self.last_loc(rows, starts),
            int((columns_cpu[1] - columns_cpu[0]).sum()),
            prefix_lens_cpu=columns_cpu[0],
            seq_lens_cpu=columns_cpu[1],
        )
        self.req_to_token_pool.write(rows, starts, stops - starts, slots)
        return slots

    def rows_of(self, states: Sequence[SequenceState]) -> list[int]:
        """The requests' rows, with new ones for requests without."""
        fresh = iter(self.req_to_token_pool.alloc(sum(state.row is None for state in states)))
        return [next(fresh) if state.row is None else state.row for state in states]

    def last_loc(self, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """The slot of each request's last cached token; meaningless if nothing is cached."""
        return self.req_to_token_pool.req_to_token[rows, (lens - 1).clamp(min=0)]

    def slots(self, state: SequenceState, start: int, end: int) -> torch.Tensor:
        """[end - start] int64: the slots of the request's tokens from start to end."""
        return self.req_to_token_pool.req_to_token[state.row, start:end].long()

    def rewrite(self, state: SequenceState, start: int, slots: torch.Tensor) -> None:
        """Point the request's tokens from `start` on to slots [n] that hold the same K and V."""
        assert state.row is not None
        self._write(state.row, start, slots)

    def _write(self, row: int, start: int, slots: torch.Tensor) -> None:
        if slots.shape[0]:
            columns = self.req_to_token_pool.req_to_token[row]
            columns[start : start + slots.shape[0]] = slots.to(columns.dtype)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy cached slots [n] int64 to others, all of them at once."""
        if self.token_to_kv_pool is not None:
            self.token_to_kv_pool.move(sources, targets)
        if self.hidden is not None:
            self.hidden.move(sources, targets)

    def slide(self, states: Sequence[SequenceState]) -> None:
        """Free the window pages of the requests' own tokens that no later token sees.

        Does nothing without a window pool.
        """
        tree, page_size = self.window_tree, self.allocator.page_size
        if tree is None:
            return
        freed: list[torch.Tensor] = []
        least = tree.span.slide_tokens(page_size)
        for state in states:
            stop = tree.span.kept_from(state.num_cached, page_size)
            start = max(state.num_behind, state.num_shared)
            if state.row is not None and stop - start >= least:
                columns = self.req_to_token_pool.req_to_token[state.row]
                freed.append(columns[start:stop:page_size])
                state.num_behind = stop
        if freed:
            self.intact = False
            tree.swa_allocator.free_swa(torch.cat(freed))
            self.intact = True

    def give_back(self, states: Sequence[SequenceState]) -> bool:
        """Free the slots that requests hold for the drafts of later steps. False if there are
        none."""
        holders = [state for state in states if state.num_spare]
        if not holders:
            return False
        self.intact = False
        size = self.allocator.page_size
        starts = ((state, -(-state.num_columns // size) * size) for state in holders)
        self.allocator.free_pages(self._pages_from(starts))
        for state in holders:
            state.num_spare = 0
        self.intact = True
        return True

    def release(self, states: Sequence[SequenceState], *, zero: bool = False) -> None:
        """Free the rows and slots of requests. Requests without a row are skipped.

        zero: overwrite their K and V, which may be NaN, infinite or unwritten after a failed step
        or one whose logits were not numbers. Shared slots stay with their owner.
        """
        held = [(state, state.row) for state in states if state.row is not None]
        if not held:
            return
        self.intact = False
        page_size = self.allocator.page_size
        # A request's own slots begin with a page
        pages = self._pages_from((state, state.num_shared) for state, _ in held)
        if zero and self.token_to_kv_pool is not None:
            offsets = torch.arange(page_size, device=pages.device)
            self.token_to_kv_pool.zero((pages.unsqueeze(1) * page_size + offsets).flatten())
        self.allocator.free_pages(pages)
        self.req_to_token_pool.free([row for _, row in held])
        for state, _ in held:
            state.forget()
        self.intact = True

    def _pages_from(self, starts: Iterable[tuple[SequenceState, int]]) -> torch.Tensor:
        """[n] int64: the pages of requests' columns from the first one of a page to the last that
        holds a slot. Every page_size-th column begins another."""
        table, page_size = self.req_to_token_pool.req_to_token, self.allocator.page_size
        firsts = []
        for state, start in starts:
            assert state.row is not None
            row = state.row * table.shape[1]
            firsts.append(np.arange(row + start, row + state.num_held, page_size))
        cells = torch.from_numpy(np.concatenate(firsts)).to(table.device)
        return table.view(-1).index_select(0, cells).long() // page_size


class Taking:
    """The block of `RequestMemory.taking`.

    Not a generator: if an interrupt suspended one, it would free the memory much later.
    """

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._pages, self._rows = memory.allocator.mark(), memory.req_to_token_pool.mark()

    def __enter__(self) -> None:
        self._memory.intact = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._memory.allocator.rewind(self._pages)
            self._memory.req_to_token_pool.rewind(self._rows)
            self._memory.intact = True
