"""Two halves of a step at once: while one computes, the other communicates."""

from __future__ import annotations

from collections.abc import Sequence

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Decision,
    DispatchingBackend,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
)
from attnmux.core.plugin import MakeBackend, MemberSteps


class TboAttnBackend(DispatchingBackend):
    """Attends in whole steps by `primary`, and in each of a step's halves by its own child.

    A layer is called with the prepared batch or with one of its `tbo_children`, which
    `ForwardBatch.with_halves` makes. A half without requests is skipped: its mode is IDLE, and its
    call returns an empty result.
    """

    def __init__(
        self, primary: AttentionBackend, children: tuple[AttentionBackend, AttentionBackend]
    ) -> None:
        """Raises InvalidInput for children of another context, the primary itself as a child, and
        padding rows of different lengths, since one graph runner pads for all."""
        super().__init__(primary.context, (primary, *children))
        if len({id(backend) for backend in (primary, *children)}) != 3:
            expected = "two backends other than primary: each has a step of its own in flight"
            raise InvalidInput("children", got="one backend twice", expected=expected)
        self.check_context("children", primary, *children)
        self.check_padding("children", primary, *children)
        self.primary = primary
        self.children = children
        self._halves: tuple[ForwardBatch, ...] = ()

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """The child of the half that the batch is, else `primary`.

        A copy of a half with other fields is that half too, as long as it has its requests.
        """
        for child, half in zip(self.children, self._halves, strict=False):
            if batch.req_pool_indices is half.req_pool_indices:
                return child
        return self.primary

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        self._halves = batch.tbo_children
        halves = zip(self.children, self._halves, strict=False)
        return ((self.primary, batch), *(pair for pair in halves if pair[1].batch_size))

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backends of that mode, for halves as this one."""
        first, second = self.children
        primary = self.primary.select(mode)
        if primary is self.primary:
            return self
        return TboAttnBackend(primary, (first.select(mode), second.select(mode)))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """For whole steps, and for their halves; the second half may be the larger."""
        self.primary.init_cuda_graph_state(max_bs, max_num_tokens)
        half = max_bs - max_bs // 2
        for child in self.children:
            child.init_cuda_graph_state(half, max_num_tokens * half // max_bs)


def make_two_batches(
    inner: MakeBackend, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `two_batches`. Raises InvalidInput for a model with linear layers."""
    if context.linear_states is not None:
        expected = "whole steps: no half of a step prepares its linear layers"
        raise InvalidInput("two_batches", got=True, expected=expected)
    primary, first, second = (inner(context, phases) for _ in range(3))
    return TboAttnBackend(primary, (first, second))
