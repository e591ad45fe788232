"""Steps that verify drafts: slots for every draft token, and the rows without the rejected ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import DraftTree, ForwardBatch, ForwardMode, InvalidInput
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.sequence import SequenceState, Step


class VerifyStep:
    """One TARGET_VERIFY step of B requests with d draft tokens each, until its `commit`.

    Node i of a request's tree gets the i-th column after its cached tokens. Until the commit, the
    requests count all of these columns as cached, so that releasing a request frees them.
    """

    def __init__(
        self, states: Sequence[SequenceState], tree: DraftTree, steps: StepBuilder
    ) -> None:
        """states: each has a row, one pending token, which is the root of its tree, and room for d
        tokens in its context. Raises PoolExhausted, changing nothing, without enough slots, and
        InvalidInput for other requests.
        """
        self.states = tuple(states)
        self._steps = steps
        self._num_drafts = num_drafts = tree.draft_token_num
        self.prefixes = [state.num_cached for state in states]
        """Cached tokens before the step."""
        self._starts = [state.num_columns for state in states]
        self._check()
        host = torch.tensor(
            [
                [state.row for state in states],
                self.prefixes,
                self._starts,
                [start + num_drafts for start in self._starts],
                [num_drafts] * len(states),
            ]
        )
        rows, prefixes, starts, stops, counts = host.to(steps.device).unbind()
        lens, lens_sum = prefixes.to(torch.int32), sum(self.prefixes)
        with steps.taking():
            slots = steps.extend_rows(rows, (starts, stops), host[2:4])
            batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(states),
                req_pool_indices=rows,
                seq_lens=lens,
                out_cache_loc=slots,
                positions=tree.positions(lens),
                seq_lens_cpu=host[1].to(torch.int32),
                seq_lens_sum=lens_sum,
                extend_seq_lens=counts.to(torch.int32),
                extend_seq_lens_cpu=host[4].to(torch.int32),
                extend_prefix_lens=lens,
                extend_prefix_lens_cpu=host[1].to(torch.int32),
                extend_num_tokens=slots.shape[0],
                spec_info=tree.spec_input(lens, seq_lens_sum=lens_sum),
            )
        for state in states:
            state.num_cached += num_drafts
        steps.intact = True
        self.step = Step(
            batch=batch,
            input_ids=tree.draft_tokens.flatten(),
            last_indices=torch.arange(slots.shape[0], device=slots.device),
        )

    def commit(self, paths: Sequence[Sequence[int]], zero: Sequence[bool] = ()) -> None:
        """Keep a path of each request's tree as its next cached tokens, and free the other slots.

        paths: nodes from the root on; empty for a request that keeps none. K and V of nodes that
        are not where the row expects them are copied, all of them at once. zero: whether to
        overwrite the K and V of a request's rejected nodes, which may be no numbers. Call it
        before any of the requests is released.
        """
        steps, pool = self._steps, self._steps.token_to_kv_pool
        moved: list[tuple[int, int, int]] = []
        zeroed: list[tuple[int, int]] = []
        for place, (state, path) in enumerate(zip(self.states, paths, strict=True)):
            row, start = state.row, self._starts[place]
            assert row is not None
            moved += [(row, start + node, start + to) for to, node in enumerate(path) if node != to]
            if zero and zero[place]:
                stop = start + self._num_drafts
                zeroed += [(row, column) for column in range(start + len(path), stop)]
        steps.intact = False
        if moved and pool is not None:
            rows, sources, targets = zip(*moved, strict=True)
            pool.move(_slots(steps, rows, sources), _slots(steps, rows, targets))
        if zeroed and pool is not None:
            pool.zero(_slots(steps, *zip(*zeroed, strict=True)))
        lens = [prefix + len(path) for prefix, path in zip(self.prefixes, paths, strict=True)]
        truncate(steps, self.states, lens)

    def _check(self) -> None:
        longest = self._steps.max_context_len
        for state, prefix in zip(self.states, self.prefixes, strict=True):
            if state.row is None or state.num_pending != 1:
                got = f"a request with {state.num_pending} pending tokens"
                raise InvalidInput("states", got=got, expected="requests that decode")
            if prefix + self._num_drafts > longest:
                got = f"{self._num_drafts} draft tokens after {prefix}"
                raise InvalidInput("tree", got=got, expected=f"a context of at most {longest}")


def truncate(steps: StepBuilder, states: Sequence[SequenceState], lens: Sequence[int]) -> None:
    """Forget the cached tokens of each request after the first `lens`, which it owns itself, and
    free the pages that are then empty."""
    page_size = steps.allocator.page_size
    freed: list[tuple[int, int]] = []
    for state, length in zip(states, lens, strict=True):
        assert state.row is not None
        end, stop = state.num_columns - (state.num_cached - length), state.num_columns
        first = -(-end // page_size) * page_size
        freed += [(state.row, column) for column in range(first, stop, page_size)]
    steps.intact = False
    if freed:
        steps.allocator.free_pages(_slots(steps, *zip(*freed, strict=True)) // page_size)
    for state, length in zip(states, lens, strict=True):
        state.num_cached = length
    steps.intact = True


def _slots(steps: StepBuilder, rows: Sequence[int], columns: Sequence[int]) -> torch.Tensor:
    """[n] int64: the slots of cells of the request table."""
    cells = torch.tensor([rows, columns]).to(steps.device)
    return steps.req_to_token_pool.req_to_token[cells[0], cells[1]].long()
