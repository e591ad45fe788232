"""Requests with their place in the KV cache, and the steps that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.errors import InvalidInput
from attnmux.core.kv import PagedAllocator, ReqToTokenPool


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """The tokens of one request, and how many of them have K and V in the cache."""

    token_ids: list[int]
    """The prompt, then what was generated."""
    row: int | None = None
    """Of the request table, from its first step to its release."""
    num_cached: int = 0
    """Leading tokens whose slots the row holds."""

    @property
    def num_pending(self) -> int:
        """Tokens that no step has run yet."""
        return len(self.token_ids) - self.num_cached


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One pass of the model over B requests with T new tokens, packed into one row."""

    batch: ForwardBatch
    input_ids: torch.Tensor
    """[T] int64"""
    last_indices: torch.Tensor
    """[B] int64: each request's last new token among the T."""


class StepBuilder:
    """Makes steps: takes rows and slots for the new tokens and writes the request table."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: PagedAllocator,
        *,
        max_step_tokens: int | None = None,
    ) -> None:
        """max_step_tokens: T of the largest step that the model can run; None for any."""
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.max_step_tokens = max_step_tokens

    def extend(self, states: Sequence[SequenceState], num_new: Sequence[int] | None = None) -> Step:
        """A step over the next `num_new` pending tokens of each request; None means all of them.

        A request's earlier tokens are its cached prefix, so a prompt may come in chunks, and a
        request with a single pending token may be among them.
        Raises PoolExhausted, changing nothing, when rows or slots do not suffice, and
        InvalidInput for counts that are not pending or do not fit into the context.
        """
        counts = [state.num_pending for state in states] if num_new is None else list(num_new)
        self._check_new(states, counts)
        prefixes = [state.num_cached for state in states]
        ends = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        new_rows = self._take_rows(states)
        try:
            host = torch.tensor([[state.row for state in states], prefixes, ends])
            rows, prefix_lens, seq_lens = host.to(self.allocator.device).unbind()
            slots = self.allocator.alloc_extend(
                prefix_lens,
                seq_lens,
                self._last_loc(rows, prefix_lens),
                sum(counts),
                prefix_lens_cpu=host[1],
                seq_lens_cpu=host[2],
            )
        except BaseException:
            self._give_rows(new_rows)
            raise
        extend_lens = seq_lens - prefix_lens
        self.req_to_token_pool.write(rows, prefix_lens, extend_lens, slots)
        input_ids, positions = self._tokens(states, prefixes, ends)
        for state, end in zip(states, ends, strict=True):
            state.num_cached = end
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
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
        )
        return Step(batch=batch, input_ids=input_ids, last_indices=extend_lens.cumsum(0) - 1)

    def decode(self, states: Sequence[SequenceState]) -> Step:
        """A step over the one pending token of each request.

        Raises PoolExhausted, changing nothing, when slots do not suffice, and InvalidInput for
        requests that were not extended, that have more to run, or whose context is full.
        """
        for state in states:
            if state.num_pending != 1 or state.row is None:
                raise InvalidInput(
                    "states",
                    came=f"a request with {state.num_pending} pending tokens",
                    expected="requests that were extended, each with one pending token",
                )
        self._check_new(states, [1] * len(states))
        ends = [state.num_cached + 1 for state in states]
        last_tokens = [state.token_ids[-1] for state in states]
        host = torch.tensor([[state.row for state in states], ends, last_tokens])
        rows, seq_lens, input_ids = host.to(self.allocator.device).unbind()
        positions = seq_lens - 1
        slots = self.allocator.alloc_decode(
            seq_lens, self._last_loc(rows, positions), seq_lens_cpu=host[1]
        )
        self.req_to_token_pool.write(rows, positions, None, slots)
        for state, end in zip(states, ends, strict=True):
            state.num_cached = end
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(states),
            req_pool_indices=rows,
            seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=slots,
            positions=positions,
            seq_lens_cpu=host[1].to(torch.int32),
            seq_lens_sum=sum(ends),
        )
        last_indices = torch.arange(len(states), device=rows.device)
        return Step(batch=batch, input_ids=input_ids, last_indices=last_indices)

    def release(self, states: Sequence[SequenceState]) -> None:
        """Free the rows and slots of requests, all at once; those without a row are left alone."""
        held = [state for state in states if state.row is not None]
        table = self.req_to_token_pool.req_to_token
        with self.allocator.free_group():
            for state in held:
                self.allocator.free(table[state.row, : state.num_cached])
        self._give_rows(held)
        for state in held:
            state.num_cached = 0

    def _tokens(
        self, states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions of each request's tokens from start to end, packed: [T] int64 each."""
        ids: list[int] = []
        positions: list[int] = []
        for state, start, end in zip(states, starts, ends, strict=True):
            ids += state.token_ids[start:end]
            positions += range(start, end)
        packed = torch.tensor([ids, positions]).to(self.allocator.device)
        return packed[0], packed[1]

    def _check_new(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        if len(set(states)) != len(states):
            raise InvalidInput("states", came="a request twice", expected="each request once")
        if self.max_step_tokens is not None and sum(counts) > self.max_step_tokens:
            raise InvalidInput(
                "num_new",
                came=f"{sum(counts)} tokens in one step",
                expected=f"at most {self.max_step_tokens}, the longest row that the model can read",
            )
        longest = self.req_to_token_pool.max_context_len
        for state, count in zip(states, counts, strict=True):
            if not 1 <= count <= state.num_pending:
                raise InvalidInput(
                    "num_new", came=count, expected=f"1 to {state.num_pending} pending tokens"
                )
            if state.num_cached + count > longest:
                raise InvalidInput(
                    "token_ids",
                    came=f"{state.num_cached + count} tokens",
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
