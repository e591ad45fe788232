"""The decode steps in which a draft model follows the likeliest paths of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    DeviceGraphs,
    ForwardBatch,
    ForwardContext,
    GraphConfig,
    GraphRunner,
    ModelInput,
)
from attnmux.parts import DraftTree
from attnmux.transformers.draft.branch_rows import BranchRows
from attnmux.transformers.draft.paths import DraftCandidates, DraftPaths
from attnmux.transformers.draft.steps import MultiStepDraftBackend
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState
from attnmux.transformers.run.step_runner import TreeKernels

INPUTS = {
    "tokens": ModelInput(dtype=torch.int64),
    "scores": ModelInput(dtype=torch.float32),
    "before": ModelInput(dtype=torch.int64),
}
"""Inputs for the paths' first tokens, repeated for each step; the last is the slot of the token
before."""


class DraftModel(Protocol):
    """A model as the loop uses it; `ModelRunner` is one."""

    @property
    def steps(self) -> StepBuilder: ...

    @property
    def context(self) -> BackendContext: ...

    def build(self, context: BackendContext) -> AttentionBackend:
        """The model's backend once more, over another request table."""

    def features_after(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's inputs in addition to tokens, for tokens that follow those in slots [n]."""

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[n] int64: the ids of the tokens that logits count; None for the whole vocabulary."""

    def logits(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logits [T, vocabulary] of a step that is prepared, inside its forward context."""


class DraftLoop:
    """Steps 2 to S of a draft, for `topk` branches of each request.

    The metadata of all steps are prepared at once, since a branch has the same slots in all of
    them. A branch that continues another one gets copies of its drafts' K and V. The loop does not
    synchronise, so that a graph holds all of it.
    """

    def __init__(self, model: DraftModel, *, topk: int, num_steps: int) -> None:
        """num_steps: S - 1, at least 1."""
        self._model = model
        self._topk = topk
        most = model.context.max_batch_size
        self._rows = BranchRows(model.steps, topk=topk, max_batch_size=most)
        table = self._rows.table
        context = replace(model.context, req_to_token_pool=table, max_batch_size=table.size)
        self.backends = MultiStepDraftBackend(context, model.build, num_steps)
        self.graphs: GraphRunner | None = None

    def capture(self, batch_sizes: Sequence[int], devices: DeviceGraphs) -> None:
        """Capture loops of all S - 1 steps. batch_sizes: requests, ascending.

        Raises GraphUnsupported for a backend without graphs; loops then run eagerly.
        """
        self.graphs = None
        config = GraphConfig(
            batch_sizes=tuple(self._topk * size for size in batch_sizes),
            tokens_per_request=len(self.backends.children),
            host_lens=True,
        )
        graphs = GraphRunner(self.backends, self._grow, config, devices=devices, inputs=INPUTS)
        graphs.capture()
        self.graphs = graphs

    def run(
        self,
        states: Sequence[SequenceState],
        scores: torch.Tensor,
        tokens: torch.Tensor,
        num_steps: int,
    ) -> DraftCandidates:
        """The candidates [B, n] of all steps, on the device.

        states: nothing pending. scores, tokens: [B, K], the first step's `likeliest`. num_steps: at
        most S - 1; 0 leaves the candidates of the first step. Raises PoolExhausted, changing
        nothing, without enough pages.
        """
        parents = torch.full_like(tokens, -1)
        if not num_steps:
            return DraftCandidates(scores=scores, tokens=tokens, parents=parents)
        batch = self._rows.open(states, num_steps)
        try:
            inputs = {
                "tokens": tokens.flatten().repeat_interleave(num_steps),
                "scores": scores.flatten().repeat_interleave(num_steps),
                "before": self._last_slots(states).repeat_interleave(self._topk * num_steps),
            }
            grown = self._run(batch, inputs)
        finally:
            self._rows.close()
        shape = (*tokens.shape, num_steps, self._topk)
        by_step = (tensor.view(shape).transpose(1, 2).flatten(1) for tensor in grown)
        both = zip((scores, tokens, parents), by_step, strict=True)
        scores, tokens, parents = (torch.cat(tensors, dim=1) for tensors in both)
        return DraftCandidates(scores=scores, tokens=tokens, parents=parents)

    def _last_slots(self, states: Sequence[SequenceState]) -> torch.Tensor:
        """[B] int64: of each request's last cached token."""
        steps = self._model.steps
        both = torch.tensor([[state.row, state.num_cached] for state in states])
        return steps.last_loc(*both.to(steps.device, non_blocking=True).unbind(1)).long()

    def forget(self) -> None:
        """The memory of all branches was freed with the rest of the pool."""
        self._rows.forget()

    def _run(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self.graphs is not None and self.graphs.can_run(batch):
            grown: Sequence[torch.Tensor] = self.graphs.replay(batch, inputs)
            return grown
        self.backends.init_forward_metadata(batch)
        return self._grow(batch, inputs)

    def _grow(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Scores, tokens and parents of the candidates of all steps, [B * K * n, K] each: a row has
        those after a branch in a step."""
        topk, steps = self._topk, self.backends.steps
        shape = (-1, topk, len(steps))
        slots, before = batch.out_cache_loc.view(shape), inputs["before"].view(shape)[..., 0]
        paths = DraftPaths.start(
            *(inputs[name].view(shape)[..., 0] for name in ("scores", "tokens"))
        )
        by_step: list[DraftCandidates] = []
        for number, step in enumerate(steps):
            if number and topk > 1:
                self._follow(paths.before, slots[..., :number])
            features = self._model.features_after(before.flatten())
            with ForwardContext.enter(self.backends, step):
                logits = self._model.logits(step, {"input_ids": paths.tokens.flatten(), **features})
            before = slots[..., number]
            paths, candidates = paths.grow(
                logits, topk + number * topk * topk, token_ids=self._model.token_ids
            )
            by_step.append(candidates)
        columns = [(each.scores, each.tokens, each.parents) for each in by_step]
        return [torch.stack(column, dim=2).flatten(0, 2) for column in zip(*columns, strict=True)]

    def _follow(self, before: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy K and V of earlier drafts to the branches that continue them.

        before: [B, K], the branch that each branch continues. slots: [B, K, earlier drafts].
        """
        sources = slots.gather(1, before.unsqueeze(2).expand_as(slots))
        self._model.steps.move(sources.flatten(), slots.flatten())


def drafted_tree(
    roots: torch.Tensor,
    found: DraftCandidates,
    draft_token_num: int,
    *,
    topk: int,
    kernels: TreeKernels | None,
) -> DraftTree:
    """The trees of the best candidates, as `DraftTree.best_of` makes them.

    roots: [B] int64 on the host. found: [B, n] on the draft model's device, which this waits for.
    kernels: of that device. The tree is on the host, except a `visible` that a kernel made.
    """
    if topk == 1:
        # A draft is at most as likely as the one before it
        drafts = found.tokens[:, : draft_token_num - 1].cpu()
        return DraftTree.chains(torch.cat([roots.unsqueeze(1), drafts], dim=1))
    if kernels is None:
        # A float64 holds every float32, and every id
        columns = (found.scores, found.tokens, found.parents)
        scores, tokens, parents = torch.stack([column.double() for column in columns]).cpu()
        return DraftTree.best_of(
            roots, scores.float(), tokens.long(), parents.long(), draft_token_num, topk=topk
        )
    moved = roots.to(found.tokens.device, non_blocking=True)
    tree = kernels.build(
        moved, found.scores, found.tokens, found.parents, draft_token_num, topk=topk
    )
    tokens, links, levels = torch.stack([tree.draft_tokens, tree.parents, tree.depths]).cpu()
    return replace(tree, draft_tokens=tokens, links=links, levels=levels)
