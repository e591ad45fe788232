"""A model on its backend: pools, steps and logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    InvalidInput,
    TunedLaunch,
    Workspace,
    forward_context,
)
from attnmux.core.plugin import shared_kernel
from attnmux.transformers.draft.loop import TreeKernels
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState, Step
from attnmux.transformers.run.capacity import Capacity, RunnerMemory, allocate
from attnmux.transformers.run.fixed_rows import fix_rows
from attnmux.transformers.run.linears import LinearKernel, multiply_by
from attnmux.transformers.run.model_call import ModelCall
from attnmux.transformers.run.ranks import ONE_RANK, Ranks
from attnmux.transformers.run.served_model import ServedModel
from attnmux.transformers.run.stats import Laps


class ModelOnBackend:
    """Runs steps of a model on the decided backend.

    It keeps no requests: a caller extends, decodes and releases its `SequenceState`s. One step is
    in flight at a time.
    """

    def __init__(
        self,
        model: ServedModel,
        decision: Decision,
        capacity: Capacity,
        *,
        launches: tuple[TunedLaunch, ...] = (),
        debug: bool = False,
        wrap: Callable[[AttentionBackend, Decision], AttentionBackend] | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Allocate the pools and build the backend.

        launches: as `BackendContext.launches`. wrap, ranks: as in `RunnerOptions`. Raises
        PoolExhausted when memory does not suffice.
        """
        self._served = model
        self._call = ModelCall(model)
        self.decision = decision
        self.ranks = ranks
        self.indexers = model.indexers
        self.images = model.images
        memory = allocate(model, decision, capacity, ranks)
        self.sizes = memory.sizes
        self.kv_tokens = memory.kv_tokens
        """Tokens that the KV memory of all ranks holds."""
        self.context = BackendContext(
            request=decision.request,
            platform=decision.platform,
            device=self.model.device,
            layers=tuple(model.layers),
            req_to_token_pool=memory.table,
            token_to_kv_pool=memory.pool,
            linear_states=memory.linear_states,
            workspace=Workspace(self.model.device),
            max_batch_size=capacity.max_batch_size,
            max_context_len=capacity.columns,
            launches=launches,
            debug=debug,
        )
        if self.indexers is not None and memory.index_keys is not None:
            self.indexers.pick_from(memory.index_keys, self.context)
        if model.compressors is not None:
            model.compressors.keep_in(memory.compressed, self.context)
        backend = self.build(self.context)
        self.backend = backend if wrap is None else wrap(backend, decision)
        self._make_linears()
        self.steps = self._step_builder(memory, capacity)
        self.graphs: GraphRunner | None = None
        """Of decode steps."""
        self.verify_graphs: GraphRunner | None = None
        """Of steps that verify drafts."""
        self.catch_up_graphs: GraphRunner | None = None
        """Of the steps in which a draft model reads what was accepted."""
        if self.images is not None:
            self.images.tower.build(decision, self.model.device)

    def _make_linears(self) -> None:
        """Kernels of a plugin serve some numbers of rows, where bits must not depend on them."""
        if self.is_deterministic:
            fix_rows(self.model, self.context.device)
            return
        linear: LinearKernel | None = shared_kernel("linear", self.context)
        if linear is not None:
            multiply_by(linear, self.model)

    @property
    def is_deterministic(self) -> bool:
        """Whether a request's logits must not depend on the other requests."""
        return self.decision.request.deterministic

    def _step_builder(self, memory: RunnerMemory, capacity: Capacity) -> StepBuilder:
        return StepBuilder(
            memory.table,
            memory.allocator,
            token_to_kv_pool=memory.pool,
            window_tree=memory.window_tree,
            max_encoder_len=capacity.max_encoder_len,
            encoder_like=self._encoder_like,
            image_width=0 if self.images is None else self.images.width,
            state_tree=memory.state_tree,
            linear_states=memory.linear_states,
            hidden=memory.hidden,
        )

    @property
    def _encoder_like(self) -> torch.Tensor | None:
        model = self.model
        if not isinstance(model, PackedDecoder):
            return None
        return torch.empty(0, model.width, dtype=model.model.dtype, device=model.device)

    def build(self, context: BackendContext) -> AttentionBackend:
        """The decided backend once more, over another request table of the same pools."""
        return self.ranks.build(self.decision, context)

    @cached_property
    def tree_kernels(self) -> TreeKernels | None:
        """Those that a plugin offers for the device. The first call compiles them."""
        kernels: TreeKernels | None = shared_kernel("draft_trees", self.context)
        return kernels

    @property
    def has_compressed_keys(self) -> bool:
        """Whether layers see keys of blocks of tokens."""
        return self._served.compressors is not None

    @property
    def model(self) -> PreTrainedModel | PackedDecoder:
        """What a step calls."""
        module: PreTrainedModel | PackedDecoder = self._call.module
        return module

    @model.setter
    def model(self, module: PreTrainedModel | PackedDecoder) -> None:
        self._call.module = module

    @property
    def is_compiled(self) -> bool:
        """Whether the model's layers run as compiled code."""
        return self._call.is_compiled

    @is_compiled.setter
    def is_compiled(self, value: bool) -> None:
        self._call.is_compiled = value

    def check_drafts(self, topk: int) -> None:
        """Raise InvalidInput unless the backend was chosen to verify drafts of `topk` branches."""
        verifies = "verify" in self.decision.phases
        chosen = (self.decision.request.spec_topk or 0) if verifies else 0
        if topk > chosen:
            got = f"drafts of {topk} branches" if chosen else "drafts"
            got += f", for a backend that was chosen without {'so many' if chosen else 'any'}"
            expected = "a runner with RunnerOptions.draft_tokens"
            expected += f" and draft_topk={topk}" if topk > 1 else ""
            raise InvalidInput("drafts", got=got, expected=expected)

    def extend(
        self, states: Sequence[SequenceState], num_new: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run the next pending tokens of each request; see `StepBuilder.extend`.

        Returns the logits after each request's last new token, [B, vocabulary]. If the model
        raises, the requests hold slots without K and V: release them with `zero`.
        """
        self.steps.slide(states)
        step = self.steps.extend(states, num_new)
        return self.forward(step, step.last_indices)

    def decode(self, states: Sequence[SequenceState]) -> torch.Tensor:
        """Run the one pending token of each request. Returns its logits, [B, vocabulary]."""
        self.steps.slide(states)
        step = self.steps.decode(states)
        return self.forward(step, step.last_indices)

    def release(self, states: Sequence[SequenceState], *, zero: bool = False) -> None:
        """Free everything that the requests hold; `zero` as in `StepBuilder.release`."""
        self.steps.release(states, zero=zero)

    def reset(self) -> None:
        """Free all rows and pages, as `StepBuilder.reset` does."""
        self.steps.reset()

    def features_after(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model reads besides tokens that follow those in slots [n]: for an EAGLE head,
        its own states of these."""
        hidden = self.steps.hidden
        return {"features": hidden.at(slots)} if hidden and self._served.head else {}

    def features_of(self, states: torch.Tensor) -> torch.Tensor:
        """What an EAGLE head joins to tokens [n], of the target's hidden states before them.

        Raises InvalidInput for states of another width than it reads, and for another model.
        """
        if self._served.head is None:
            raise InvalidInput("target", got="states for a model", expected="an EAGLE head")
        return self._served.head.from_target(states)

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[n] int64: the ids of the tokens that logits count; None for the whole vocabulary."""
        return None if self._served.head is None else self._served.head.token_ids

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    # Not inference mode: captures cannot have its tensors, and compiled code would be made twice.
    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(self, step: Step, indices: torch.Tensor, laps: Laps | None = None) -> torch.Tensor:
        """Run a step. Returns the logits after the tokens at `indices`, [len(indices), vocabulary].

        indices: [n] int64 among the step's T tokens. The next step may overwrite the result, as
        the replay of a graph does. laps: counts the time as "metadata" and "launch"; that of a
        replayed graph is all "launch".
        """
        return self.ranks.run(step, indices, partial(self._forward, laps=laps or Laps()))

    def _forward(self, step: Step, indices: torch.Tensor, laps: Laps) -> torch.Tensor:
        batch, inputs = step.batch, self._call.inputs(step)
        mode = batch.forward_mode
        graphs = self.verify_graphs if mode.is_target_verify() else self.graphs
        graphs = self.catch_up_graphs if mode.is_draft_extend() else graphs
        size = self.ranks.graph_size(batch, graphs)
        if graphs is None or size is None:
            return self._run(step, inputs, indices, laps)
        logits = cast("torch.Tensor", graphs.replay(batch, inputs, size=size))
        laps.lap("launch")
        every = not mode.is_draft_extend() and indices is step.last_indices
        return logits if every else logits[indices]

    @torch.inference_mode(False)
    @torch.no_grad()
    def idle(self) -> bool:
        """Run a step without requests, for other ranks that have some. Returns False if no rank
        has any."""
        return self.ranks.idle(self.graphs, self._run_padding)

    def _run_padding(self) -> None:
        seq_len = self.backend.select(ForwardMode.DECODE).get_cuda_graph_seq_len_fill_value()
        step = Step.padding(seq_len, self.context.device)
        self._run(step, {"input_ids": step.input_ids}, step.last_indices, Laps())

    def _run(
        self, step: Step, inputs: Mapping[str, torch.Tensor], indices: torch.Tensor, laps: Laps
    ) -> torch.Tensor:
        """Run a step eagerly."""
        batch, mode = step.batch, step.batch.forward_mode
        eagerly: AbstractContextManager[None] = nullcontext()
        if self._served.compressors is not None:
            eagerly = self._served.compressors.eagerly()
        if self.indexers is not None and self.indexers.picker is not None:
            batch = replace(batch, topk_indices=self.indexers.picker.room(batch))
            eagerly = self.indexers.eagerly()
        self.backend.init_forward_metadata(batch)
        laps.lap("metadata")
        every = (mode.is_target_verify() or mode.is_decode()) and indices is step.last_indices
        with forward_context(self.backend, batch), eagerly:
            logits = self.logits(batch, inputs, None if every else indices)
        laps.lap("launch")
        return logits

    def logits(
        self,
        batch: ForwardBatch,
        inputs: Mapping[str, torch.Tensor],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the model on a prepared step, inside its `forward_context`.

        keep: [n] int64, the tokens whose logits [n, vocabulary] are returned; None for all T.
        """
        return self._call.logits(batch, inputs, keep)
