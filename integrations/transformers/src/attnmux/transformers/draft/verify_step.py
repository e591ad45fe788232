"""Steps that verify drafts: slots for every draft token, and the rows without the rejected ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from attnmux.core import ForwardBatch, ForwardMode, GraphRunner, InvalidInput
from attnmux.parts import DraftTree
from attnmux.transformers.draft.verify_rows import VerifyRows
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState, Step


class VerifyStep:
    """One TARGET_VERIFY step of B requests with n draft tokens each, until its `commit`.

    Node i of a request's tree gets the i-th column after its cached tokens. The requests keep the
    slots of these columns, whichever tokens are accepted: those of rejected nodes serve the next
    step.
    """

    def __init__(
        self,
        states: Sequence[SequenceState],
        tree: DraftTree,
        steps: StepBuilder,
        graphs: GraphRunner | None = None,
        *,
        ahead: Callable[[], int] = lambda: 0,
        rows: VerifyRows | None = None,
    ) -> None:
        """states: each has a row, one pending token, which is the root of its tree, and room for n
        tokens in its context. tree: on the host. graphs: if they can run the step, it has as many
        nodes d for each request as they have. Those after the n are padding, whose K and V go to
        slot 0; every context has room for them too. ahead: tokens for which requests get further
        slots, if they get any and as far as free ones go: later steps then take none. rows: of the
        last step, which serve this one if it has the same requests. That step is over.
        Raises PoolExhausted, changing nothing, without enough slots, and InvalidInput for other
        requests.
        """
        self.states = tuple(states)
        self._steps = steps
        self._ahead = ahead
        self.num_drafts = num_drafts = tree.draft_token_num
        """n"""
        self.prefixes = [state.num_cached for state in states]
        """Cached tokens before the step."""
        self._check()
        has_more = self._least_spare() < num_drafts and self._reserve(num_drafts, ahead())
        self._width = width = self._nodes_of(tree, graphs)
        self.tree = tree = tree.padded(width)
        """The trees with d nodes each."""
        if rows is None or not rows.serve(states, width):
            rows = VerifyRows(states, width, steps)
        elif has_more:
            rows.read_slots(wait=True)
        self.rows = rows
        """For the next step, which then overwrites the tensors of this one."""
        rows.place(self.prefixes, tree, num_drafts)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(self.prefixes),
            req_pool_indices=rows.indices,
            seq_lens=rows.lens,
            out_cache_loc=rows.slots,
            positions=rows.positions,
            seq_lens_cpu=rows.lens_cpu,
            seq_lens_sum=sum(self.prefixes),
            extend_seq_lens=rows.counts,
            extend_seq_lens_cpu=rows.counts_cpu,
            extend_prefix_lens=rows.lens,
            extend_prefix_lens_cpu=rows.lens_cpu,
            extend_num_tokens=len(self.prefixes) * width,
            spec_info=rows.chains if tree.visible is None else tree.spec_input(steps.device),
        )
        self.step = Step(batch=batch, input_ids=rows.input_ids, last_indices=rows.order)

    def commit(self, paths: Sequence[Sequence[int]], zero: Sequence[bool] = ()) -> None:
        """Keep a path of each request's tree as its next cached tokens.

        paths: nodes from the root on; empty for a request that keeps none. K and V of nodes that
        are not where the row expects them are copied, all of them at once. zero: whether to
        overwrite the K and V of a request's rejected nodes, which may be no numbers. Linear layers
        get the states after the last node of each path. Call it before any of the requests is
        released.
        """
        steps, pool = self._steps, self._steps.token_to_kv_pool
        steps.intact = False
        if pool is not None and self.tree.visible is not None:
            self._move(paths)
        counts = [len(path) for path in paths]
        if steps.linear_states is not None:
            accepted = torch.tensor(counts).to(steps.device, non_blocking=True)
            steps.linear_states.accept(self.rows.indices, accepted)
        for state, num in zip(self.states, counts, strict=True):
            state.num_cached += num
            state.num_spare -= num
        if pool is not None and any(zero):
            zeroed: list[int] = []
            for place, path in enumerate(paths):
                if zero[place]:
                    first = place * self._width
                    zeroed += range(first + len(path), first + self.num_drafts)
            # Padding of the same request may have left such values in slot 0
            pool.zero(pad(self._slots_of(zeroed), (0, 1)))
        steps.intact = True

    def take_ahead(self) -> None:
        """Take slots for the next step, if a request may lack some and enough are free.

        Call it while the device runs this step: the next one then has nothing to wait for.
        """
        num, ahead = self.num_drafts, self._ahead()
        wanted = max(num, min(2 * num, ahead))
        lacks = self._least_spare() < wanted <= self._free_each()
        if lacks and self._reserve(wanted, ahead):
            self.rows.read_slots(wait=False)

    def _least_spare(self) -> int:
        return min([state.num_spare for state in self.states])

    def _free_each(self) -> int:
        """Tokens for which each request finds slots, whatever its last page holds."""
        allocator = self._steps.allocator
        return allocator.available_size() // len(self.states) - allocator.page_size

    def _reserve(self, most: int, ahead: int) -> bool:
        """Take slots for `most` tokens of each request, and for more if there are enough. False if
        no context has room for another."""
        steps, states = self._steps, self.states
        most += max(0, min(ahead, self._free_each() - most))
        starts = [state.num_held for state in states]
        stops = [
            max(start, min(state.num_columns + most, steps.max_context_len))
            for start, state in zip(starts, states, strict=True)
        ]
        if starts == stops:
            return False
        host = torch.tensor([[state.row for state in states], starts, stops])
        rows, *columns = host.to(steps.device).unbind()
        with steps.taking():
            steps.extend_rows(rows, columns, host[1:])
        for state, stop in zip(states, stops, strict=True):
            state.num_spare = stop - state.num_columns
        steps.intact = True
        return True

    def _move(self, paths: Sequence[Sequence[int]]) -> None:
        """Copy the K and V of paths that are not the first nodes of their trees."""
        sources: list[int] = []
        targets: list[int] = []
        for place, path in enumerate(paths):
            first, length = place * self._width, len(path)
            if length and path[-1] != length - 1:
                sources += [first + node for node in path]
                targets += range(first, first + length)
        if sources:
            self._steps.move(self._slots_of(sources), self._slots_of(targets))

    def _slots_of(self, nodes: list[int]) -> torch.Tensor:
        """[m] int64: the slots of nodes, by their places among the B * d."""
        slots = self.rows.slots
        return slots.index_select(0, torch.tensor(nodes).to(slots.device))

    def _nodes_of(self, tree: DraftTree, graphs: GraphRunner | None) -> int:
        """d: that of the graphs if they serve the step."""
        if graphs is None:
            return self.num_drafts
        config, room = graphs.config, self._steps.max_context_len - max(self.prefixes)
        serves = (
            len(self.states) <= config.max_batch_size
            and config.visible == (tree.visible is not None)
            and self.num_drafts <= config.tokens_per_request <= room
        )
        return config.tokens_per_request if serves else self.num_drafts

    def _check(self) -> None:
        # A row is missing only where nothing is cached
        pending = [len(state.token_ids) - state.num_cached for state in self.states]
        if pending.count(1) < len(pending) or 0 in self.prefixes:
            got = f"requests with {pending} pending tokens after {self.prefixes}"
            raise InvalidInput("states", got=got, expected="requests that decode")
        longest, most = max(self.prefixes), self._steps.max_context_len
        if longest + self.num_drafts > most:
            got = f"{self.num_drafts} draft tokens after {longest}"
            raise InvalidInput("tree", got=got, expected=f"a context of at most {most}")
