"""Builds steps of the model from requests: rows and slots for the new tokens, and the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from attnmux.core import (
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
    PagedAllocator,
    ReqToTokenPool,
)
from attnmux.transformers.decode_batch import DecodeBatch
from attnmux.transformers.hidden_states import HiddenStates
from attnmux.transformers.images.step import images_of, mask_of, positions_of
from attnmux.transformers.prefixes import PrefixTree, StatePrefixTree, WindowPrefixTree
from attnmux.transformers.sequence import (
    RequestMemory,
    SequenceState,
    Step,
    check_encoder_len,
    split_encoder,
)


class StepBuilder(RequestMemory):
    """Takes rows and slots for the new tokens of a step and writes the request table.

    If building a step raises, its rows and slots are free again. If a signal interrupts the
    accounting itself, `intact` stays False until `reset`.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: PagedAllocator,
        *,
        token_to_kv_pool: KVPool | None = None,
        window_tree: WindowPrefixTree | None = None,
        state_tree: StatePrefixTree | None = None,
        max_step_tokens: int | None = None,
        max_encoder_len: int = 0,
        has_linear_states: bool = False,
        hidden: HiddenStates | None = None,
    ) -> None:
        """token_to_kv_pool: holds the slots' K and V; None without any to zero.

        window_tree: an empty tree on `allocator`, for a model with a window pool. Callers then
        `slide` requests before they build steps.
        state_tree: an empty tree on `allocator`, for a model whose linear layers' states are kept.
        max_step_tokens: T of the largest step that the model can run; None for any.
        max_encoder_len: the most encoder tokens of a request. Every row of the table has columns
        for them before its tokens. 0 for a decoder-only model.
        has_linear_states: the model's linear layers have states in the rows of the table.
        hidden: the hidden states of the slots' tokens; None for a model that keeps none.

        `prefix_tree` starts empty and is for the caller. It owns slots of the allocator and lives
        as long as that.
        """
        super().__init__(req_to_token_pool, allocator)
        self.token_to_kv_pool = token_to_kv_pool
        own_tree = window_tree or state_tree
        self.prefix_tree = own_tree or PrefixTree(allocator, allocator.page_size)
        self.window_tree = window_tree
        """The prefix tree, if the model has a window pool."""
        self.state_tree = state_tree
        """The prefix tree, if the states of linear layers are kept."""
        self.max_step_tokens = max_step_tokens
        self.max_encoder_len = max_encoder_len
        self.has_linear_states = has_linear_states
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

    def extend(
        self,
        states: Sequence[SequenceState],
        num_new: Sequence[int] | None = None,
        *,
        forward_mode: ForwardMode = ForwardMode.EXTEND,
    ) -> Step:
        """A step over the next `num_new` pending tokens of each request; None means all of them.

        A request's earlier tokens are its cached prefix, so that a prompt may run in chunks.
        Decoding requests may take part with their single pending token; the mode is then MIXED.
        Raises PoolExhausted when rows or slots do not suffice, and InvalidInput for counts that
        are not pending or do not fit into the context. An exception changes nothing.
        """
        counts = [state.num_pending for state in states] if num_new is None else list(num_new)
        self._check_new(states, counts)
        self.give_back(states)
        ends = [state.num_cached + count for state, count in zip(states, counts, strict=True)]
        with self.taking():
            rows = self._rows_of(states)
            step = self._make_extend(states, counts, rows, forward_mode)
        for state, row, end in zip(states, rows, ends, strict=True):
            state.row, state.num_cached = row, end
            state.encoder_cached = state.encoder_states is not None
        self.intact = True
        return step

    def _make_extend(
        self,
        states: Sequence[SequenceState],
        counts: Sequence[int],
        in_rows: Sequence[int],
        forward_mode: ForwardMode,
    ) -> Step:
        prefixes = [state.num_cached for state in states]
        ends = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        starts = [state.num_columns for state in states]
        stops = [state.encoder_len + end for state, end in zip(states, ends, strict=True)]
        encoder = [state.encoder_len for state in states]
        host = torch.tensor([in_rows, prefixes, ends, starts, stops, encoder])
        rows, prefix_lens, seq_lens, *columns, encoder_lens = host.to(self.device).unbind()
        slots = self.extend_rows(rows, columns, host[3:5])
        extend_lens = seq_lens - prefix_lens
        input_ids, positions = self._tokens(states, prefixes, ends)
        slots, encoder_slots, encoder_states = split_encoder(slots, states, counts)
        batch = ForwardBatch(
            forward_mode=forward_mode,
            batch_size=len(states),
            req_pool_indices=rows,
            seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=slots,
            positions=positions,
            seq_lens_cpu=host[2].to(torch.int32),
            seq_lens_sum=sum(ends),
            extend_seq_lens=extend_lens.to(torch.int32),
            extend_seq_lens_cpu=(host[2] - host[1]).to(torch.int32),
            extend_prefix_lens=prefix_lens.to(torch.int32),
            extend_prefix_lens_cpu=host[1].to(torch.int32),
            extend_num_tokens=sum(counts),
            encoder_lens=encoder_lens.to(torch.int32) if self.max_encoder_len else None,
            encoder_out_cache_loc=encoder_slots,
            spec_info=mask_of(states, prefixes, ends, self.device),
        )
        position_ids = positions_of(states, prefixes, ends)
        return Step(
            batch=batch,
            input_ids=input_ids,
            last_indices=extend_lens.cumsum(0) - 1,
            encoder_states=encoder_states,
            images=images_of(states, prefixes, ends),
            position_ids=None if position_ids is None else position_ids.to(self.device),
        )

    def decode(self, states: Sequence[SequenceState]) -> Step:
        """A step over the one pending token of each request.

        Raises PoolExhausted, changing nothing, when slots do not suffice, and InvalidInput for
        requests that were not extended, that have more to run, or whose context is full.
        """
        return self.decode_batch(states).step()

    def decode_batch(self, states: Sequence[SequenceState]) -> DecodeBatch:
        """For many steps over the same requests; raises InvalidInput as `decode` does.

        The caller makes sure that the contexts have room for the steps after the first.
        """
        for state in states:
            if state.num_pending != 1 or state.row is None:
                raise InvalidInput(
                    "states",
                    got=f"a request with {state.num_pending} pending tokens",
                    expected="requests that were extended, each with one pending token",
                )
        self._check_new(states, [1] * len(states))
        self.give_back(states)
        return DecodeBatch(states, self)

    def adopt(self, state: SequenceState, slots: torch.Tensor) -> None:
        """Give a new request a row that begins with the shared slots [n] int64, whole pages.

        Raises PoolExhausted, changing nothing, without a free row.
        """
        with self.taking():
            (row,) = self.req_to_token_pool.alloc(1)
            self._write(row, 0, slots)
        state.row, state.num_cached, state.num_shared = row, slots.shape[0], slots.shape[0]
        self.intact = True

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

    def rewrite(self, state: SequenceState, start: int, slots: torch.Tensor) -> None:
        """Point the request's tokens from `start` on to slots [n] that hold the same K and V."""
        assert state.row is not None
        self._write(state.row, start, slots)

    def _write(self, row: int, start: int, slots: torch.Tensor) -> None:
        if slots.shape[0]:
            columns = self.req_to_token_pool.req_to_token[row]
            columns[start : start + slots.shape[0]] = slots.to(columns.dtype)

    def slots(self, state: SequenceState, start: int, end: int) -> torch.Tensor:
        """[end - start] int64: the slots of the request's tokens from start to end."""
        return self.req_to_token_pool.req_to_token[state.row, start:end].long()

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

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy what is cached in slots [n] int64 to others, all of them at once."""
        if self.token_to_kv_pool is not None:
            self.token_to_kv_pool.move(sources, targets)
        if self.hidden is not None:
            self.hidden.move(sources, targets)

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

    def _tokens(
        self, states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions of each request's tokens from start to end, packed: [T] int64 each."""
        ids: list[int] = []
        positions: list[int] = []
        for state, start, end in zip(states, starts, ends, strict=True):
            ids += state.token_ids[start:end]
            positions += range(start, end)
        packed = torch.tensor([ids, positions]).to(self.device)
        return packed[0], packed[1]

    def _check_new(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        if len(set(states)) != len(states):
            raise InvalidInput("states", got="a request twice", expected="each request once")
        if self.max_step_tokens is not None and sum(counts) > self.max_step_tokens:
            raise InvalidInput(
                "num_new",
                got=f"{sum(counts)} tokens in one step",
                expected=f"at most {self.max_step_tokens}, the longest row that the model can read",
            )
        longest = self.max_context_len
        for state, count in zip(states, counts, strict=True):
            check_encoder_len(state.encoder_len, self.max_encoder_len)
            if not 1 <= count <= state.num_pending:
                raise InvalidInput(
                    "num_new", got=count, expected=f"1 to {state.num_pending} pending tokens"
                )
            if state.num_cached + count > longest:
                raise InvalidInput(
                    "token_ids",
                    got=f"{state.num_cached + count} tokens",
                    expected=f"at most the context of {longest} tokens",
                )

    def _rows_of(self, states: Sequence[SequenceState]) -> list[int]:
        """The requests' rows, with new ones for requests without."""
        fresh = iter(self.req_to_token_pool.alloc(sum(state.row is None for state in states)))
        return [next(fresh) if state.row is None else state.row for state in states]

    def last_loc(self, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """The slot of each request's last cached token; meaningless if nothing is cached."""
        return self.req_to_token_pool.req_to_token[rows, (lens - 1).clamp(min=0)]
