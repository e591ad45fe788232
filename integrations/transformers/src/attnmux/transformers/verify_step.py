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
)
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.sequence import SequenceState, Step


class VerifyStep:
    """One TARGET_VERIFY step of B requests with n draft tokens each, until its `commit`.

    Node i of a request's tree gets the i-th column after its cached tokens. The requests keep the
    slots of these columns, whatever is accepted: those of rejected nodes serve the next step.
    """

    def __init__(
        self,
        states: Sequence[SequenceState],
        tree: DraftTree,
        steps: StepBuilder,
        graphs: GraphRunner | None = None,
        *,
        ahead: int = 0,
    ) -> None:
        """states: each has a row, one pending token, which is the root of its tree, and room for n
        tokens in its context. tree: on the host. graphs: where they can run the step, it has as
        many nodes d for each request as they have. Those after the n are padding, whose K and V go
        to slot 0; every context has room for them too. ahead: tokens for which requests get slots
        besides, where they get any and as far as free ones go: later steps then take none.
        Raises PoolExhausted, changing nothing, without enough slots, and InvalidInput for other
        requests.
        """
        self.states = tuple(states)
        self._steps = steps
        self._num_drafts = num_drafts = tree.draft_token_num
        self._check()
        self.prefixes = [state.num_cached for state in states]
        """Cached tokens before the step."""
        if any(state.num_spare < num_drafts for state in states):
            self._reserve(ahead)
        starts = [state.num_columns for state in states]
        places = np.array([[state.row for state in states], self.prefixes, starts])
        width = self._width(tree, graphs)
        self.tree = tree = tree.padded(width)
        """The trees with d nodes each."""
        num, lens_sum = len(states), sum(self.prefixes)
        lens_cpu = torch.from_numpy(places[1].astype(np.int32))
        counts_cpu = torch.full_like(lens_cpu, width)
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
        self.step = Step(batch=batch, input_ids=input_ids, last_indices=order)

    def commit(self, paths: Sequence[Sequence[int]], zero: Sequence[bool] = ()) -> None:
        """Keep a path of each request's tree as its next cached tokens.

        paths: nodes from the root on; empty for a request that keeps none. K and V of nodes that
        are not where the row expects them are copied, all of them at once. zero: whether to
        overwrite the K and V of a request's rejected nodes, which may be no numbers. Call it
        before any of the requests is released.
        """
        steps, pool, num = self._steps, self._steps.token_to_kv_pool, self._num_drafts
        steps.intact = False
        if pool is not None and self.tree.visible is not None:
            self._move(paths)
        for state, path in zip(self.states, paths, strict=True):
            state.num_cached += len(path)
            state.num_spare -= len(path)
        if pool is not None and any(zero):
            zeroed: list[int] = []
            for place, path in enumerate(paths):
                if zero[place]:
                    zeroed += range(place * num + len(path), (place + 1) * num)
            # Padding of the same request may have left such values in slot 0
            pool.zero(pad(self._slots_of(zeroed), (0, 1)))
        steps.intact = True

    def _reserve(self, ahead: int) -> None:
        """Take slots for the drafts, and for more tokens if there are enough."""
        steps, states, most = self._steps, self.states, self._num_drafts
        each = steps.allocator.available_size() // len(states) - steps.allocator.page_size
        most += max(0, min(ahead, each - most))
        starts = [state.num_held for state in states]
        stops = [
            max(start, min(state.num_columns + most, steps.max_context_len))
            for start, state in zip(starts, states, strict=True)
        ]
        host = torch.tensor([[state.row for state in states], starts, stops])
        rows, *columns = host.to(steps.device).unbind()
        with steps.taking():
            steps.extend_rows(rows, columns, host[1:])
        for state, stop in zip(states, stops, strict=True):
            state.num_spare = stop - state.num_columns
        steps.intact = True

    def _move(self, paths: Sequence[Sequence[int]]) -> None:
        """Copy the K and V of paths that are not the first nodes of their trees."""
        sources: list[int] = []
        targets: list[int] = []
        for place, path in enumerate(paths):
            first, length = place * self._num_drafts, len(path)
            if length and path[-1] != length - 1:
                sources += [first + node for node in path]
                targets += range(first, first + length)
        if sources:
            self._steps.move(self._slots_of(sources), self._slots_of(targets))

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


def place(
    places: np.ndarray, tree: DraftTree, num_new: int, steps: StepBuilder
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """The values of a step on the device, and the slots [B * n] of its n columns of each request.

    places: [3, B] int64: rows, cached tokens, and columns before the new ones. tree: padded to d
    nodes. The values are int64: rows [B], cached tokens and d of each request [2 B], the tree's
    tokens, positions and places [B * d] each. One copy takes all of them to the device.
    """
    num, width = places.shape[1], tree.draft_token_num
    table = steps.req_to_token_pool.req_to_token
    sources, offsets, sizes = _layout(num, width, num_new)
    values = [places[:2].ravel(), places[0] * table.shape[1] + places[2], (width, 0)]
    host = np.concatenate([*values, tree.draft_tokens.numpy().ravel()])[sources] + offsets
    if tree.visible is not None:
        depths = tree.depths.numpy() + places[1][:, None]
        first = sum(sizes[:3])
        host[first : first + sizes[3]] = depths.ravel()
    moved = torch.from_numpy(host).to(steps.device, non_blocking=True)
    *fixed, cells = torch.split_with_sizes(moved, sizes)
    return fixed, table.view(-1).index_select(0, cells).long()


def _halves(both: torch.Tensor) -> Sequence[torch.Tensor]:
    num = both.shape[0] // 2
    return torch.split_with_sizes(both, [num, num])
