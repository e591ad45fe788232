"""A model on its backend: pools, steps and logits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    GraphRunner,
    InvalidInput,
    Workspace,
)
from attnmux.core.plugin import shared_kernel
from attnmux.transformers.model.hidden_states import HiddenStates
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.part import part_of
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState, Step
from attnmux.transformers.run.linears import LinearKernel, fix_rows, multiply_by
from attnmux.transformers.run.memory import RunnerMemory, ServedModel, allocate
from attnmux.transformers.run.pieces import PromptPieces
from attnmux.transformers.run.stats import Laps
from attnmux.transformers.run.step_runner import TreeKernels

P = TypeVar("P")


class ModelOnBackend:
    """Runs steps of a model on the decided backend.

    It keeps no requests: a caller extends, decodes and releases its `SequenceState`s. One step is
    in flight at a time.
    """

    def __init__(
        self,
        model: ServedModel,
        decision: Decision,
        options: RunnerOptions,
    ) -> None:
        """Allocate the pools and build the backend.

        options: those that the decision follows, with the `max_encoder_len` of an encoder-decoder
        model, and None for any other. Raises InvalidInput without a limit of the KV pool, and
        PoolExhausted when memory does not suffice.
        """
        self.served = model
        self.model: PreTrainedModel | PackedDecoder = model.module
        """The module that a step calls."""
        forward = inspect.signature(self.model.forward)
        self._keeps_logits = "logits_to_keep" in forward.parameters
        self.is_compiled = False
        """Whether the model's layers run as compiled code."""
        self.decision = decision
        self.ranks = options.ranks
        memory = allocate(model, decision, options)
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
            max_batch_size=options.max_batch_size,
            max_context_len=options.columns,
            launches=options.launches,
            debug=options.debug,
        )
        for part in model.parts:
            part.attach(self.context, decision)
        backend = self.build(self.context)
        self.backend = backend if options.wrap is None else options.wrap(backend, decision)
        self._make_linears()
        self.steps = self._step_builder(memory, options)
        self.graphs: GraphRunner | None = None
        """Graphs of decode steps."""
        self.verify_graphs: GraphRunner | None = None
        """Graphs of steps that verify drafts."""
        self.catch_up_graphs: GraphRunner | None = None
        """Graphs of the steps in which a draft model reads accepted tokens."""
        self.pieces: PromptPieces | None = None
        """Steps over prompts, in pieces between attention calls."""

    def part(self, kind: type[P]) -> P | None:
        """The model's part of a kind; None without one."""
        return part_of(self.served.parts, kind)

    def _make_linears(self) -> None:
        """Kernels of a plugin serve some numbers of rows, if bits must not depend on them."""
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

    def _step_builder(self, memory: RunnerMemory, options: RunnerOptions) -> StepBuilder:
        images = self.part(ImageReader)
        return StepBuilder(
            memory.table,
            memory.allocator,
            token_to_kv_pool=memory.pool,
            window_tree=memory.window_tree,
            max_encoder_len=options.max_encoder_len or 0,
            encoder_like=self._encoder_like,
            image_width=0 if images is None else images.width,
            state_tree=memory.state_tree,
            linear_states=memory.linear_states,
            hidden=self.part(HiddenStates),
        )

    @property
    def _encoder_like(self) -> torch.Tensor | None:
        model = self.model
        if not isinstance(model, PackedDecoder):
            return None
        return torch.empty(0, model.width, dtype=model.model.dtype, device=model.device)

    def build(self, context: BackendContext) -> AttentionBackend:
        """The decided backend once more, over another request table of the same pools."""
        return self.ranks.building.build(self.decision, context)

    @cached_property
    def tree_kernels(self) -> TreeKernels | None:
        """Kernels that a plugin offers for the device. The first call compiles them."""
        kernels: TreeKernels | None = shared_kernel("draft_trees", self.context)
        return kernels

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
        """The model's inputs in addition to the tokens that follow those in slots [n]: for an EAGLE
        head, its own states of these."""
        hidden = self.steps.hidden
        return {"features": hidden.at(slots)} if hidden and self.served.head else {}

    def features_of(self, states: torch.Tensor) -> torch.Tensor:
        """Features that an EAGLE head joins to tokens [n], from the target's hidden states before
        them.

        Raises InvalidInput for states of another width than it reads, and for another model.
        """
        if self.served.head is None:
            raise InvalidInput("target", got="states for a model", expected="an EAGLE head")
        return self.served.head.from_target(states)

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[n] int64: the ids of the tokens that logits count; None for the whole vocabulary."""
        return None if self.served.head is None else self.served.head.token_ids

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def forward(self, step: Step, indices: torch.Tensor, laps: Laps | None = None) -> torch.Tensor:
        """Run a step. Returns the logits after the tokens at `indices`, [len(indices), vocabulary].

        indices: [n] int64 among the step's T tokens. The next step may overwrite the result, as
        the replay of a graph does. laps: counts the time as "metadata" and "launch"; that of a
        replayed graph is all "launch".
        """
        laps = laps or Laps()
        # Captures cannot have tensors of inference mode, and compiled code would be made twice.
        with torch.inference_mode(False), torch.no_grad():
            run, kept = self.ranks.steps.begin(step, indices)
            mode, inputs = run.batch.forward_mode, self._inputs(run)
            is_last = kept is run.last_indices
            graphs = self._graphs(mode)
            size = self.ranks.steps.graph_size(run.batch, graphs)
            if graphs is not None and size is not None:
                logits = cast("torch.Tensor", graphs.replay(run.batch, inputs, size=size))
                if mode.is_draft_extend() or not is_last:
                    logits = logits[kept]
            elif self.pieces is not None and self.pieces.serves(run.batch, inputs, len(kept)):
                self.backend.init_forward_metadata(run.batch)
                laps.lap("metadata")
                logits = self.pieces.replay(run.batch, inputs, kept)
            else:
                every = (mode.is_target_verify() or mode.is_decode()) and is_last
                with ExitStack() as stack:
                    batch = self._prepare(run, stack, laps)
                    logits = self.logits(batch, inputs, None if every else kept)
            laps.lap("launch")
            return self.ranks.steps.end(logits, len(indices))

    def _graphs(self, mode: ForwardMode) -> GraphRunner | None:
        if mode.is_draft_extend():
            return self.catch_up_graphs
        return self.verify_graphs if mode.is_target_verify() else self.graphs

    def idle(self) -> bool:
        """Run a step without requests, for other ranks that have some. Returns False if no rank
        has any."""
        with torch.inference_mode(False), torch.no_grad():
            return self.ranks.steps.idle(self.graphs, self._run_padding)

    def _run_padding(self) -> None:
        seq_len = self.backend.select(ForwardMode.DECODE).get_cuda_graph_seq_len_fill_value()
        step = Step.padding(seq_len, self.context.device)
        with ExitStack() as stack:
            batch = self._prepare(step, stack, Laps())
            self.logits(batch, {"input_ids": step.input_ids})

    def _prepare(self, step: Step, stack: ExitStack, laps: Laps) -> ForwardBatch:
        """The batch of a step that runs eagerly while `stack` is open."""
        batch = step.batch
        for part in self.served.parts:
            batch = stack.enter_context(part.eager(batch))
        self.backend.init_forward_metadata(batch)
        laps.lap("metadata")
        stack.enter_context(ForwardContext.enter(self.backend, batch))
        return batch

    def _inputs(self, step: Step) -> dict[str, torch.Tensor]:
        """The model's arguments in a step that the batch does not have."""
        optional = {"encoder_states": step.encoder_states, "features": step.features}
        inputs = {name: tensor for name, tensor in optional.items() if tensor is not None}
        for part in self.served.parts:
            inputs.update(part.inputs(step))
        return {"input_ids": step.input_ids, **inputs}

    def logits(
        self,
        batch: ForwardBatch,
        inputs: Mapping[str, torch.Tensor],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the model on a prepared step, inside its `ForwardContext.enter`.

        keep: [n] int64, the tokens whose logits [n, vocabulary] are returned; None for all T.
        """
        arguments = dict(inputs)
        positions = arguments.pop("position_ids", batch.positions)
        for part in self.served.parts:
            positions = part.places(positions)
        # A compiler makes other code for tensors that begin elsewhere in their memory.
        positions = positions.clone() if self.is_compiled else positions
        tokens = "input_ids"
        if "inputs_embeds" in arguments:
            tokens = "inputs_embeds"
            del arguments["input_ids"]
        arguments[tokens] = arguments[tokens].unsqueeze(0)
        keeps = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        model: Any = self.model
        logits: torch.Tensor = model(
            position_ids=positions.unsqueeze(-2), use_cache=False, **arguments, **keeps
        ).logits[0]
        return logits if keep is None or keeps else logits[keep]
