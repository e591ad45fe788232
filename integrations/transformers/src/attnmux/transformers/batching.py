"""Steps of the model, made of requests: rows and slots for the new tokens, and the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import (
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    PagedAllocator,
    PrefixTree,
    ReqToTokenPool,
)
from attnmux.transformers.decode_batch import DecodeBatch
from attnmux.transformers.sequence import SequenceState, Step, check_encoder_len, split_encoder


class StepBuilder:
    """Makes steps: takes rows and slots for the new tokens and writes the request table."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: PagedAllocator,
        *,
        max_step_tokens: int | None = None,
        max_encoder_len: int = 0,
    ) -> None:
        """max_step_tokens: T of the largest step that the model can run; None for any.

        max_encoder_len: encoder tokens of a request, for which every row of the table has columns
        in front of the tokens'; 0 in a decoder-only model.

        `prefix_tree` is empty and for the caller to use: it owns slots of the allocator, and lives
        as long.
        """
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.prefix_tree = PrefixTree(allocator, allocator.page_size)
        self.max_step_tokens = max_step_tokens
        self.max_encoder_len = max_encoder_len

    @property
    def device(self) -> torch.device:
        return self.allocator.device

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest request, its encoder's apart."""
        return self.req_to_token_pool.max_context_len - self.max_encoder_len

    def extend(
        self,
        states: Sequence[SequenceState],
        num_new: Sequence[int] | None = None,
        *,
        forward_mode: ForwardMode = ForwardMode.EXTEND,
    ) -> Step:
        """A step over the next `num_new` pending tokens of each request; None means all of them.

        A request's earlier tokens are its cached prefix, so a prompt may come in chunks, and a
        request with a single pending token may be among them; where it decodes, the mode is MIXED.
        Raises PoolExhausted, changing nothing, when rows or slots do not suffice, and
        InvalidInput for counts that are not pending or do not fit into the context.
        """
        counts = [state.num_pending for state in states] if num_new is None else list(num_new)
        self._check_new(states, counts)
        prefixes = [state.num_cached for state in states]
        ends = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        starts = [state.num_columns for state in states]
        stops = [state.encoder_len + end for state, end in zip(states, ends, strict=True)]
        encoder = [state.encoder_len for state in states]
        new_rows = self._take_rows(states)
        try:
            in_rows = [state.row for state in states]
            host = torch.tensor([in_rows, prefixes, ends, starts, stops, encoder])
            rows, prefix_lens, seq_lens, *columns, encoder_lens = host.to(self.device).unbind()
            slots = self._extend_rows(rows, columns, host[3:5])
        except BaseException:
            self._give_rows(new_rows)
            raise
        extend_lens = seq_lens - prefix_lens
        input_ids, positions = self._tokens(states, prefixes, ends)
        slots, encoder_slots, encoder_states = split_encoder(slots, states, counts)
        for state, end in zip(states, ends, strict=True):
            state.num_cached = end
            state.encoder_cached = state.encoder_states is not None
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
        )
        return Step(
            batch=batch,
            input_ids=input_ids,
            last_indices=extend_lens.cumsum(0) - 1,
            encoder_states=encoder_states,
        )

    def decode(self, states: Sequence[SequenceState]) -> Step:
        """A step over the one pending token of each request.

        Raises PoolExhausted, changing nothing, when slots do not suffice, and InvalidInput for
        requests that were not extended, that have more to run, or whose context is full.
        """
        return self.decode_batch(states).step()

    def decode_batch(self, states: Sequence[SequenceState]) -> DecodeBatch:
        """For many steps over the same requests; raises InvalidInput as `decode` does.

        That their contexts have room for the steps after the first is the caller's part.
        """
        for state in states:
            if state.num_pending != 1 or state.row is None:
                raise InvalidInput(
                    "states",
                    got=f"a request with {state.num_pending} pending tokens",
                    expected="requests that were extended, each with one pending token",
                )
        self._check_new(states, [1] * len(states))
        return DecodeBatch(states, self.req_to_token_pool, self.allocator)

    def adopt(self, state: SequenceState, slots: torch.Tensor) -> None:
        """Give a new request a row that begins with the shared slots [n] int64, whole pages.

        Raises PoolExhausted, changing nothing, without a free row.
        """
        self._take_rows([state])
        state.num_cached = state.num_shared = slots.shape[0]
        self.rewrite(state, 0, slots)

    def rewrite(self, state: SequenceState, start: int, slots: torch.Tensor) -> None:
        """Let the request's tokens from `start` on lie at slots [n] that hold the same K and V."""
        if slots.shape[0]:
            row = self.req_to_token_pool.req_to_token[state.row]
            row[start : start + slots.shape[0]] = slots.to(row.dtype)

    def slots(self, state: SequenceState, start: int, end: int) -> torch.Tensor:
        """[end - start] int64: where the request's tokens from start to end lie."""
        return self.req_to_token_pool.req_to_token[state.row, start:end].long()

    def release(self, states: Sequence[SequenceState]) -> None:
        """Free the rows and slots of requests, all at once; those without a row are left alone.

        Shared slots stay with their owner.
        """
        held = [state for state in states if state.row is not None]
        if not held:
            return
        table, page_size = self.req_to_token_pool.req_to_token, self.allocator.page_size
        # What a request owns begins with a page, so that every page_size-th column is a new one.
        firsts = [table[one.row, one.num_shared : one.num_columns : page_size] for one in held]
        self.allocator.free_pages(torch.cat(firsts).long() // page_size)
        self._give_rows(held)
        for state in held:
            state.num_cached = state.num_shared = 0
            state.encoder_cached = False

    def _extend_rows(
        self, rows: torch.Tensor, columns: Sequence[torch.Tensor], columns_cpu: torch.Tensor
    ) -> torch.Tensor:
        """Slots for what is new of each request, written to its columns from start to stop."""
        starts, stops = columns
        slots = self.allocator.alloc_extend(
            starts,
            stops,
            self._last_loc(rows, starts),
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

    def _take_rows(self, states: Sequence[SequenceState]) -> list[SequenceState]:
        new = [state for state in states if state.row is None]
        for state, row in zip(new, self.req_to_token_pool.alloc(len(new)), strict=True):
            state.row = row
        return new

    def _give_rows(self, states: Sequence[SequenceState]) -> None:
        self.req_to_token_pool.free([state.row for state in states if state.row is not None])
        for state in states:
            state.row = None

    def _last_loc(self, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Slot of each request's last cached token; of no meaning where nothing is cached."""
        return self.req_to_token_pool.req_to_token[rows, (lens - 1).clamp(min=0)]
