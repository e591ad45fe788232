"""Steps that verify drafts: slots for every draft token, and the rows without the rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch.nn.functional import pad

from attnmux.core import (
    DraftTree,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    InvalidInput,
    KVPool,
)
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
        self._check()
        self.prefixes = [state.num_cached for state in states]
        """Cached tokens before the step."""
        self._starts = [state.num_columns for state in states]
        places = np.array([[state.row for state in states], self.prefixes, self._starts])
        width = self._width(tree, graphs)
        self.tree = tree = tree.padded(width)
        """The trees with d nodes each."""
        num, lens_sum = len(states), sum(self.prefixes)
        lens_cpu = torch.from_numpy(places[1].astype(np.int32))
        counts_cpu = torch.full_like(lens_cpu, width)
        with steps.taking():
            fixed, slots = place(places, tree, num_drafts, steps)
            rows, both, input_ids, positions, order = fixed
            self._slots = slots
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
                spec_info=tree.spec_input(steps.device),
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
        steps, pool = self._steps, self._steps.token_to_kv_pool
        page_size = steps.allocator.page_size
        num = self._num_drafts
        zeroed: list[int] = []
        freed: list[int] = []
        steps.intact = False
        if pool is not None and self.tree.visible is not None:
            self._move(pool, paths)
        for place, (start, path) in enumerate(zip(self._starts, paths, strict=True)):
            first, kept = place * num, len(path)
            if zero and zero[place]:
                zeroed += range(first + kept, first + num)
            opened = kept + -(start + kept) % page_size
            freed += range(first + opened, first + num, page_size)
            self.states[place].num_cached = self.prefixes[place] + kept
        if pool is not None and zeroed:
            # Padding of the same request may have left such values in slot 0
            pool.zero(pad(self._slots_of(zeroed), (0, 1)))
        if freed:
            pages = self._slots_of(freed)
            steps.allocator.free_pages(pages if page_size == 1 else pages // page_size)
        steps.intact = True

    def _move(self, pool: KVPool, paths: Sequence[Sequence[int]]) -> None:
        """Copy the K and V of paths that are not the first nodes of their trees."""
        sources: list[int] = []
        targets: list[int] = []
        for place, path in enumerate(paths):
            first, length = place * self._num_drafts, len(path)
            if length and path[-1] != length - 1:
                sources += [first + node for node in path]
                targets += range(first, first + length)
        if sources:
            pool.move(self._slots_of(sources), self._slots_of(targets))

    def _slots_of(self, nodes: list[int]) -> torch.Tensor:
        """[m] int64: the slots of nodes, by their places among the B * n."""
        return self._slots.index_select(0, torch.tensor(nodes).to(self._slots.device))

    def _width(self, tree: DraftTree, graphs: GraphRunner | None) -> int:
        """d: that of the graphs if they serve the step."""
        if graphs is None:
            return self._num_drafts
        config, room = graphs.config, self._steps.max_context_len - max(self.prefixes)
        serves = (
            len(self.states) <= config.max_batch_size
            and config.visible == (tree.visible is not None)
            and self._num_drafts <= config.tokens_per_request <= room
        )
        return config.tokens_per_request if serves else self._num_drafts

    def _check(self) -> None:
        most = self._steps.max_context_len - self._num_drafts
        for state in self.states:
            if state.row is None or state.num_pending != 1:
                got = f"a request with {state.num_pending} pending tokens"
                raise InvalidInput("states", got=got, expected="requests that decode")
            if state.num_cached > most:
                got = f"{self._num_drafts} draft tokens after {state.num_cached}"
                expected = f"a context of at most {self._steps.max_context_len}"
                raise InvalidInput("tree", got=got, expected=expected)


@lru_cache(maxsize=64)
def _layout(num: int, width: int, num_new: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """How the values of a step's tensors are made from a few of each request, all int64.

    They are `values[sources] + offsets`, where values are [rows, cached tokens, first cells,
    width, 0, tokens]; the last are their numbers: rows [B], cached tokens and counts [2 B],
    tokens, positions and places [B * d] each, and cells of the request table [B * n].
    """
    each, nodes = np.arange(num), np.arange(num * width)
    request, node = nodes // width, nodes % width
    nothing, zeros = np.full(num * width, 3 * num + 1), np.zeros(num * width, np.int64)
    parts = [
        (each, zeros[:num]),
        (each + num, zeros[:num]),
        (np.full(num, 3 * num), zeros[:num]),
        (3 * num + 2 + nodes, zeros),
        (num + request, node),
        (nothing, nodes),
        (2 * num + each.repeat(num_new), np.tile(np.arange(num_new), num)),
    ]
    sources, offsets = (np.concatenate(one) for one in zip(*parts, strict=True))
    return sources, offsets, [num, 2 * num, *[num * width] * 3, num * num_new]


@lru_cache(maxsize=64)
def _pages(page_size: int, num_new: int) -> tuple[np.ndarray, np.ndarray]:
    """[page_size, n] int64 each, by the place in its page of the first new token: the page of each
    new token, 0 for the one with the last cached token, and its place there."""
    places = np.arange(page_size)[:, None] + np.arange(num_new)
    return places // page_size + (np.arange(page_size) == 0)[:, None], places % page_size


def place(
    places: np.ndarray, tree: DraftTree, num_new: int, steps: StepBuilder
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """Take slots for n new tokens of each request, and write them to the request table.

    places: [3, B] int64: rows, cached tokens, and columns in use. tree: padded to d nodes. Returns
    int64 tensors on the device (rows [B], cached tokens and d of each request [2 B], the tree's
    tokens, positions and places [B * d] each), and the slots [B * n]. One copy takes all values to
    the device. Call it while `taking`.
    """
    num, width, page_size = places.shape[1], tree.draft_token_num, steps.allocator.page_size
    table = steps.req_to_token_pool.req_to_token
    sources, offsets, sizes = _layout(num, width, num_new)
    starts = places[2]
    values = [places[:2].ravel(), places[0] * table.shape[1] + starts, (width, 0)]
    host = np.concatenate([*values, tree.draft_tokens.numpy().ravel()])[sources] + offsets
    if tree.visible is not None:
        depths = tree.depths.numpy() + places[1][:, None]
        first = sum(sizes[:3])
        host[first : first + sizes[3]] = depths.ravel()
    num_pages = num * num_new
    if page_size > 1:
        relative, in_page = (known[starts % page_size] for known in _pages(page_size, num_new))
        opened = relative[:, -1]
        ends = opened.cumsum()
        num_pages = int(ends[-1])
        before = (ends - opened + num - 1)[:, None]
        of_page = np.where(relative > 0, before + relative, np.arange(num)[:, None])
        final = values[1] - 1
        host = np.concatenate([host, of_page.ravel(), in_page.ravel(), final])
        sizes = [*sizes, of_page.size, of_page.size, num]
    moved = torch.from_numpy(host).to(steps.device, non_blocking=True)
    *fixed, cells = (parts := torch.split_with_sizes(moved, sizes))[:6]
    slots, flat = steps.allocator.alloc_pages(num_pages), table.view(-1)
    if page_size > 1:
        page_index, offset, last = parts[6:]
        pages = torch.cat([flat.index_select(0, last) // page_size, slots])
        slots = (pages.index_select(0, page_index) * page_size).add_(offset)
    flat.index_copy_(0, cells, slots.to(table.dtype))
    return fixed, slots


def _halves(both: torch.Tensor) -> Sequence[torch.Tensor]:
    num = both.shape[0] // 2
    return torch.split_with_sizes(both, [num, num])
