"""All decode steps of a draft model's round, prepared at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    DispatchingBackend,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
)
from attnmux.core.plugin import FixedTensors


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StepTensors:
    """Tensors that differ between the steps, [steps, R] each, so that a step's values are
    contiguous."""

    lens: torch.Tensor
    """int32"""
    slots: torch.Tensor
    """int64"""
    positions: torch.Tensor
    """int64"""

    @classmethod
    def of(cls, batch: ForwardBatch, num_steps: int) -> _StepTensors:
        order = torch.arange(num_steps, dtype=torch.int32, device=batch.seq_lens.device)
        by_row = batch.batch_size, num_steps
        return cls(
            lens=batch.seq_lens + order.unsqueeze(1),
            slots=batch.out_cache_loc.view(by_row).t().contiguous(),
            positions=batch.positions.view(by_row).t().contiguous(),
        )


class MultiStepDraftBackend(DispatchingBackend):
    """Decode steps that follow each other over the same rows, each with a backend of its own.

    A draft model decodes R branches for up to `num_steps` steps, and knows the slots of all of them
    before the first. The batch to prepare is a DECODE batch with the tokens of all n steps:
    `req_pool_indices` [R], `seq_lens` [R] of the first step, its token included, and
    `out_cache_loc` and `positions` [R * n], those of a row together. `steps` then has the batch of
    each step, whose calls go to `children[i]`.
    """

    def __init__(
        self,
        context: BackendContext,
        make: Callable[[BackendContext], AttentionBackend],
        num_steps: int,
    ) -> None:
        """make: builds a backend of the context, once for each step.

        Raises InvalidInput for fewer steps than 1, and for a backend of another context.
        """
        InvalidInput.check_at_least(1, "num_steps", num_steps)
        backends = (make(context) for _ in range(num_steps))
        self.children = tuple(step.select(ForwardMode.DECODE) for step in backends)
        super().__init__(context, self.children)
        for child in self.children:
            child_context = child.context
            pools = child_context.req_to_token_pool, child_context.token_to_kv_pool
            if pools != (context.req_to_token_pool, context.token_to_kv_pool):
                expected = "a backend of the given context"
                raise InvalidInput("make", got="a backend of another context", expected=expected)
        self.steps: tuple[ForwardBatch, ...] = ()
        """The batches of the prepared steps."""
        self._tensors = FixedTensors()

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """The child of one of `steps`. Raises InvalidInput for another batch."""
        for child, step in zip(self.children, self.steps, strict=False):
            if step.out_cache_loc is batch.out_cache_loc:
                return child
        raise InvalidInput("batch", got="a step that was not prepared", expected="one of `steps`")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for child in self.children:
            child.init_cuda_graph_state(max_bs, max_bs)
        shape = (len(self.children), max_bs)
        slots = torch.zeros(shape, dtype=torch.int64, device=self.context.device)
        self._tensors.add(lens=slots.int(), slots=slots, positions=slots.clone())

    def parts(
        self, batch: ForwardBatch, *, eager: bool
    ) -> Iterable[tuple[AttentionBackend, ForwardBatch]]:
        """All steps. Raises InvalidInput for a malformed batch."""
        self.steps = self._split(batch)
        return zip(self.children, self.steps, strict=False)

    def _split(self, batch: ForwardBatch) -> tuple[ForwardBatch, ...]:
        """The batch of each step."""
        num_rows, num_tokens = batch.batch_size, batch.out_cache_loc.shape[0]
        num_steps = num_tokens // max(num_rows, 1)
        if not batch.forward_mode.is_decode():
            raise InvalidInput("forward_mode", got=batch.forward_mode.name, expected="DECODE")
        if not 1 <= num_steps <= len(self.children) or num_steps * num_rows != num_tokens:
            got = f"{num_tokens} slots for {num_rows} rows"
            expected = f"as many for each, from 1 to {len(self.children)}"
            raise InvalidInput("out_cache_loc", got=got, expected=expected)
        values = self._tensors.holding(_StepTensors.of(batch, num_steps))
        lens_cpu, total = batch.seq_lens_cpu, batch.seq_lens_sum
        return tuple(
            ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=num_rows,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=values.lens[step],
                out_cache_loc=values.slots[step],
                positions=values.positions[step],
                seq_lens_cpu=None if lens_cpu is None else lens_cpu + step,
                seq_lens_sum=None if total is None else total + step * num_rows,
                actual_forward_mode=batch.actual_forward_mode,
            )
            for step in range(num_steps)
        )
