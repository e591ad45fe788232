"""Steps that verify drafts: slots for every draft token, and the rows without the rejected ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from attnmux.core import DraftTree, ForwardBatch, ForwardMode, GraphRunner, InvalidInput
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.sequence import SequenceState, Step


class VerifyStep:
    """One TARGET_VERIFY step of B requests with n draft tokens each, until its `commit`.

    Node i of a request's tree gets the i-th column after its cached tokens. Until the commit, the
    requests count all of these columns as cached, so that releasing a request frees them.
    """

    def __init__(
        self,
        states: Sequence[SequenceState],
        tree: DraftTree,
        steps: StepBuilder,
        graphs: GraphRunner | None = None,
    ) -> None:
        """states: each has a row, one pending token, which is the root of its tree, and room for n
        tokens in its context. tree: on the host. graphs: where they can run the step, it has as
        many nodes d for each request as they have. Those after the n are padding, whose K and V go
        to slot 0; every context has room for them too.
        Raises PoolExhausted, changing nothing, without enough slots, and InvalidInput for other
        requests.
        """
        self.states = tuple(states)
        self._steps = steps
        self._num_drafts = num_drafts = tree.draft_token_num
        self.prefixes = [state.num_cached for state in states]
        """Cached tokens before the step."""
        self._starts = [state.num_columns for state in states]
        self._check()
        width = self._width(tree, graphs)
        self.tree = tree = tree.padded(width)
        """The trees with d nodes each."""
        num, lens_sum = len(states), sum(self.prefixes)
        places = np.array([[state.row for state in states], self.prefixes, self._starts])
        # The lengths and the counts of new tokens, which kernels read as int32
        lens_host = np.repeat(np.int64(width), 2 * num)
        lens_host[:num] = places[1]
        lens_cpu, counts_cpu = _halves(torch.from_numpy(lens_host.astype(np.int32)))
        nodes = places[1][:, None] + _depths(tree)
        with steps.taking():
            new = NewColumns(places, num_drafts, steps)
            rows, both, input_ids, positions, order = new.place(
                lens_host, tree.draft_tokens.numpy().ravel(), nodes.ravel(), np.arange(nodes.size)
            )
            self._slots = slots = new.slots
            if width > num_drafts:
                slots = pad(slots.view(num, num_drafts), (0, width - num_drafts)).view(-1)
            lens, counts = _halves(both.to(torch.int32))
            batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=num,
                req_pool_indices=rows,
                seq_lens=lens,
                out_cache_loc=slots,
                positions=positions,
                seq_lens_cpu=lens_cpu,
                seq_lens_sum=lens_sum,
                extend_seq_lens=counts,
                extend_seq_lens_cpu=counts_cpu,
                extend_prefix_lens=lens,
                extend_prefix_lens_cpu=lens_cpu,
                extend_num_tokens=slots.shape[0],
                spec_info=tree.spec_input(lens, seq_lens_sum=lens_sum),
            )
        for state in states:
            state.num_cached += num_drafts
        steps.intact = True
        self.step = Step(batch=batch, input_ids=input_ids, last_indices=order)

    def commit(self, paths: Sequence[Sequence[int]], zero: Sequence[bool] = ()) -> None:
        """Keep a path of each request's tree as its next cached tokens, and free the other slots.

        paths: nodes from the root on; empty for a request that keeps none. K and V of nodes that
        are not where the row expects them are copied, all of them at once. zero: whether to
        overwrite the K and V of a request's rejected nodes, which may be no numbers. Call it
        before any of the requests is released.
        """
        steps, pool, num = self._steps, self._steps.token_to_kv_pool, self._num_drafts
        page_size = steps.allocator.page_size
        sources: list[int] = []
        targets: list[int] = []
        zeroed: list[int] = []
        freed: list[int] = []
        for place, (start, path) in enumerate(zip(self._starts, paths, strict=True)):
            first, kept = place * num, len(path)
            if kept and path[-1] != kept - 1:
                sources += [first + node for node in path]
                targets += range(first, first + kept)
            if zero and zero[place]:
                zeroed += range(first + kept, first + num)
            opened = kept + -(start + kept) % page_size
            freed += range(first + opened, first + num, page_size)
        steps.intact = False
        if pool is not None and sources:
            pool.move(self._slots_of(sources), self._slots_of(targets))
        if pool is not None and zeroed:
            # Padding of the same request may have left such values in slot 0
            pool.zero(pad(self._slots_of(zeroed), (0, 1)))
        if freed:
            pages = self._slots_of(freed)
            steps.allocator.free_pages(pages if page_size == 1 else pages // page_size)
        for state, prefix, path in zip(self.states, self.prefixes, paths, strict=True):
            state.num_cached = prefix + len(path)
        steps.intact = True

    def _slots_of(self, nodes: list[int]) -> torch.Tensor:
        """[n] int64: the slots of nodes, by their places among the B * n."""
        return self._slots.index_select(0, torch.from_numpy(np.array(nodes)).to(self._slots.device))

    def _width(self, tree: DraftTree, graphs: GraphRunner | None) -> int:
        """d: that of the graphs if they serve the step."""
        if graphs is None:
            return self._num_drafts
        config, room = graphs.config, self._steps.max_context_len - max(self.prefixes)
        serves = (
            len(self.states) <= config.max_batch_size
            and config.custom_mask == (tree.visible is not None)
            and self._num_drafts <= config.tokens_per_request <= room
        )
        return config.tokens_per_request if serves else self._num_drafts

    def _check(self) -> None:
        longest = self._steps.max_context_len
        for state, prefix in zip(self.states, self.prefixes, strict=True):
            if state.row is None or state.num_pending != 1:
                got = f"a request with {state.num_pending} pending tokens"
                raise InvalidInput("states", got=got, expected="requests that decode")
            if prefix + self._num_drafts > longest:
                got = f"{self._num_drafts} draft tokens after {prefix}"
                raise InvalidInput("tree", got=got, expected=f"a context of at most {longest}")


class NewColumns:
    """Slots for n new tokens of each of B requests, and one copy to the device."""

    def __init__(self, places: np.ndarray, num_new: int, steps: StepBuilder) -> None:
        """places: [3, B] int64: rows, cached tokens, and columns in use.

        Takes pages when it is `place`d.
        """
        self._places, self._num_new, self._steps = places, num_new, steps

    def place(self, *host: np.ndarray) -> Sequence[torch.Tensor]:
        """Write the new slots to the request table. Returns the rows [B] int64 and the other
        arrays [m] int64 on the device. Call it while `taking`."""
        steps, page_size = self._steps, self._steps.allocator.page_size
        table = steps.req_to_token_pool.req_to_token
        rows, _, starts = self._places
        columns = starts[:, None] + np.arange(self._num_new)
        cells = columns + (rows * table.shape[1])[:, None]
        parts = [rows, *host, cells.ravel()]
        num_pages = columns.size
        if page_size > 1:
            # Page 0 of a request is the one with its last column; the others are new
            page = columns // page_size - ((starts - 1) // page_size)[:, None]
            opened = page[:, -1]
            ends = opened.cumsum()
            num_pages = int(ends[-1])
            order = np.arange(rows.size)
            before = (ends - opened + rows.size - 1)[:, None]
            of_page = np.where(page > 0, before + page, order[:, None])
            final = cells[:, 0] - (starts > 0)
            parts += [of_page.ravel(), (columns % page_size).ravel(), final]
        # One copy for all of them
        joined = torch.from_numpy(np.concatenate(parts)).to(steps.device, non_blocking=True)
        moved = torch.split_with_sizes(joined, [part.size for part in parts])
        slots = steps.allocator.alloc_pages(num_pages)
        flat, num_fixed = table.view(-1), 1 + len(host)
        if page_size > 1:
            of_page, offsets, final = moved[num_fixed + 1 :]
            pages = torch.cat([flat.index_select(0, final) // page_size, slots])
            slots = (pages.index_select(0, of_page) * page_size).add_(offsets)
        flat.index_copy_(0, moved[num_fixed], slots.to(table.dtype))
        self.slots = slots
        """[B * n] int64"""
        return moved[:num_fixed]


def _halves(both: torch.Tensor) -> Sequence[torch.Tensor]:
    num = both.shape[0] // 2
    return torch.split_with_sizes(both, [num, num])


def _depths(tree: DraftTree) -> np.ndarray:
    """[B, d] or [1, d] int64: see `DraftTree.depths`."""
    if tree.visible is None:
        return np.arange(tree.draft_token_num)[None]
    return tree.depths.numpy()


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
